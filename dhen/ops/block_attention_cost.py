"""What attention over a layout of blocks costs: its FLOPs, and its memory on a tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dhen.cost import ATTENTION, SOFTMAX_FLOPS, CostRow, Costs, elementwise_cost
from dhen.memory.tape import FP32_BYTES, MASK_BYTES, Held, Tape
from dhen.ops.block_attention import is_fused, together
from dhen.ops.block_layout import BlockLayout

INDEX_BYTES = 8


def block_attention_cost(layout: BlockLayout, dim: int) -> Costs:
    """Returns the two products and the softmax of all pairs of blocks, padding included."""
    scores = layout.pairs * layout.size**2
    flops = 2.0 * scores * (dim // len(layout.heads))
    return (
        CostRow("scores", ATTENTION, flops),
        elementwise_cost("softmax", scores, flops_each=SOFTMAX_FLOPS),
        CostRow("values", ATTENTION, flops),
    )


def block_attention_tape(tape: Tape, qkv: int, layout: BlockLayout, dim: int, *, p: float) -> int:
    """Writes down `BlockAttention` of queries, keys and values; the tensor of its output."""
    m, heads = layout.embeddings, len(layout.heads)
    tape.buffer_bytes += INDEX_BYTES * _indices(layout)
    if is_fused(tape.device, layout, dim // heads, p):
        return fused_attention_tape(tape, qkv, m, dim, heads)
    sizes, split = list(_sizes(layout, dim // heads)), layout.blocks * layout.size * dim
    saved = [tape.scratch(3 * split)]
    for size in sizes:
        saved.append(tape.scratch(size.scores))
        if p:
            saved.append(tape.scratch(size.scores, itemsize=MASK_BYTES))
    return tape.operation(
        m * dim,
        [qkv],
        saves=saved,
        running=_held(tape, _running(tape.itemsize, sizes, split, m * dim, p)),
        backward_running=_held(tape, _backward_running(tape.itemsize, sizes, split, m * dim, p)),
    )


def fused_attention_tape(tape: Tape, qkv: int, embeddings: int, dim: int, heads: int) -> int:
    """Writes down attention in one kernel, which keeps its inputs, its output, and a number per row of scores."""
    values, sums = embeddings * dim, tape.scratch(heads * embeddings, itemsize=FP32_BYTES)
    attended = tape.operation(
        values, [qkv], saves=[qkv, sums], saves_output=True, backward_running=tape.held(3 * values)
    )
    return tape.copy(attended) if heads > 1 else attended


class _Sizes(NamedTuple):
    """Numbers per example of blocks that are computed together."""

    queries: int
    keys: int
    scores: int
    gathered_queries: int
    """Those of `queries` that are copied for it."""
    gathered_keys: int

    def forward(self, itemsize: int, p: float) -> int:
        """Most bytes at a moment: scores; their softmax; its dropout; the products with v."""
        masks, dropped = (MASK_BYTES, self.scores) if p else (0, 0)
        return max(
            itemsize * (self.gathered_queries + self.gathered_keys + self.scores),
            itemsize * 2 * self.scores,
            (itemsize + 2 * masks) * self.scores,
            masks * self.scores + itemsize * (self.scores + dropped + self.gathered_keys + self.queries),
        )

    def backward(self, p: float) -> int:
        """Most numbers at a moment: gradients of v; of the scores; of q and k."""
        others = max(
            (self.scores if p else 0) + self.keys,
            self.gathered_keys + 2 * self.scores,
            self.scores + self.gathered_keys + self.queries,
            self.scores + self.gathered_queries + self.keys,
        )
        return self.gathered_queries + others


def _sizes(layout: BlockLayout, head: int) -> Iterator[_Sizes]:
    size = layout.size
    for group in together(layout):
        queries, keys = size * head * len(group.rows), size * head * len(group.columns)
        yield _Sizes(
            queries=queries,
            keys=keys,
            scores=size * size * len(group.columns),
            gathered_queries=queries if group.gathers_rows(layout) else 0,
            gathered_keys=keys if group.gathers_columns(layout) else 0,
        )


def _running(itemsize: int, sizes: list[_Sizes], split: int, out: int, p: float) -> int:
    """Bytes of forward beside what it saves and puts out; blocks of later groups have not been made before."""
    kept = itemsize + (MASK_BYTES if p else 0)
    not_yet = kept * sum(size.scores for size in sizes) + itemsize * out
    most = 0
    for size in sizes:
        most = max(most, size.forward(itemsize, p) - not_yet)
        not_yet -= kept * size.scores
    return itemsize * split + most


def _backward_running(itemsize: int, sizes: list[_Sizes], split: int, out: int, p: float) -> int:
    """The same of backward, whose gradient of queries, keys and values is made last."""
    return itemsize * (4 * split + max(0, *(size.backward(p) - 3 * out for size in sizes)))


def _held(tape: Tape, row_bytes: int) -> Held:
    return Held(row_bytes * tape.rows)


def _indices(layout: BlockLayout) -> int:
    """Numbers of blocks that are gathered."""
    groups = together(layout)
    rows = sum(len(group.rows) for group in groups if group.gathers_rows(layout))
    return rows + sum(len(group.columns) for group in groups if group.gathers_columns(layout))
