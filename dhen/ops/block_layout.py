"""Layouts of block-sparse attention: which blocks of embeddings attend to which others.

M embeddings are cut into N blocks in a row, and a layout has for each block the blocks that it attends to:
`fixed` is that of Sparse Transformers (arXiv 1904.10509, section 4.3) without its causal mask, `sliding_window`
Longformer's (arXiv 2004.05150, section 3.1), `with_random` adds BigBird's third part (arXiv 2007.14062, section
2), and `variable` is what DeepSpeed's sparse attention has beside them. Blocks that attend to all and to which
all attend are global.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Blocks = list[set[int]]
"""For each block of queries the blocks of keys that it attends to."""


class BlockLayout(NamedTuple):
    """A layout over a number of embeddings."""

    embeddings: int
    """M, the embeddings that are cut into blocks."""
    size: int
    """Embeddings of each block; the last may have fewer."""
    heads: tuple[tuple[tuple[int, ...], ...], ...]
    """For each head and each block of queries the blocks of keys that it attends to, in ascending order."""

    @property
    def blocks(self) -> int:
        """N, the number of blocks."""
        return len(self.heads[0])

    @property
    def padding(self) -> int:
        """Embeddings that the last block lacks."""
        return self.blocks * self.size - self.embeddings

    @property
    def pairs(self) -> int:
        """Pairs of blocks that attend, over all heads."""
        return sum(len(row) for head in self.heads for row in head)

    def part(self, rank: int, ranks: int) -> BlockLayout:
        """Returns the layout of one rank's heads, of which each of `ranks` has equally many."""
        each = len(self.heads) // ranks
        return self._replace(heads=self.heads[rank * each : (rank + 1) * each])

    def table(self) -> Tensor:
        """Returns bool of (heads, N, N): whether a block of queries attends to a block of keys."""
        table = torch.zeros(len(self.heads), self.blocks, self.blocks, dtype=torch.bool)
        for place, head in enumerate(self.heads):
            for row, columns in enumerate(head):
                table[place, row, list(columns)] = True
        return table

    def mask(self) -> Tensor:
        """Returns the same for each embedding: bool of (heads, M, M)."""
        whole = self.table().repeat_interleave(self.size, 1).repeat_interleave(self.size, 2)
        return whole[:, : self.embeddings, : self.embeddings]


def layout_of(embeddings: int, size: int, heads: Sequence[Blocks]) -> BlockLayout:
    """Returns the layout of heads over blocks of this size; if all attends to all it is one block."""
    count = len(heads[0])
    if all(len(row) == count for head in heads for row in head):
        return BlockLayout(embeddings, embeddings, (((0,),),) * len(heads))
    return BlockLayout(embeddings, size, tuple(tuple(tuple(sorted(row)) for row in head) for head in heads))


def cut(embeddings: int, most: int) -> tuple[int, int]:
    """Returns the number and the size of blocks of at most so many embeddings, as even as they can be."""
    count = -(-embeddings // most)
    return count, -(-embeddings // count)


def fixed(count: int, *, local_blocks: Sequence[int], summaries: int, turn: int = 0) -> Blocks:
    """Returns local groups, each block attending to its own, and to the summaries of all.

    Args:
        count: N, the number of blocks.
        local_blocks: blocks of each group from the first on; the last number stands for all that follow.
        summaries: blocks at the end of each group to which all blocks attend.
        turn: which run of so many blocks the summaries are, counted from the group's end; heads may differ in it.
    """
    groups = list(_groups(count, local_blocks))
    summary: set[int] = set()
    for group in groups:
        runs = max(len(group) // max(summaries, 1), 1)
        end = len(group) - turn % runs * summaries
        summary.update(group[max(end - summaries, 0) : end])
    return [set(group) | summary for group in groups for _ in group]


def sliding_window(count: int, *, window: int, global_blocks: int) -> Blocks:
    """Returns blocks that attend to so many on each side of their own; the first `global_blocks` are global."""
    rows = [set(range(max(i - window, 0), min(i + window + 1, count))) for i in range(count)]
    return _with_global(rows, range(global_blocks))


def variable(count: int, *, local_blocks: Sequence[int], positions: Iterable[int]) -> Blocks:
    """Returns local groups as those of `fixed`, with global blocks at these positions, as far as they exist."""
    rows = [set(group) for group in _groups(count, local_blocks) for _ in group]
    return _with_global(rows, positions)


def with_random(rows: Blocks, number: int, generator: random.Random) -> Blocks:
    """Returns the layout with so many more blocks for each block, drawn among those it does not attend to yet.

    Which ones follows from numbers of `Random.random` alone, which every version of Python draws alike.
    """
    found = []
    for row in rows:
        others = [block for block in range(len(rows)) if block not in row]
        found.append(row.union(sorted(others, key=lambda _: generator.random())[:number]))
    return found


def given(count: int, rows: Sequence[str]) -> Blocks:
    """Returns a written layout: a text per block, whose characters 1 are the blocks that it attends to.

    If there are fewer blocks than texts, a block stands for several and attends to what any of them does.
    """
    blocks: Blocks = [set() for _ in range(count)]
    for i, row in enumerate(rows):
        attended = (j for j, character in enumerate(row) if character == "1")
        blocks[i * count // len(rows)].update(j * count // len(rows) for j in attended)
    return blocks


def _groups(count: int, sizes: Sequence[int]) -> Iterator[range]:
    """Yields the blocks of each local group."""
    start, place = 0, 0
    while start < count:
        end = min(start + sizes[min(place, len(sizes) - 1)], count)
        yield range(start, end)
        start, place = end, place + 1


def _with_global(rows: Blocks, positions: Iterable[int]) -> Blocks:
    count = len(rows)
    chosen = {position for position in positions if position < count}
    return [set(range(count)) if i in chosen else row | chosen for i, row in enumerate(rows)]
