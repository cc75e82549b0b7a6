"""Embedding tables as blocks: some columns of all rows of a table, and row-wise Adagrad's sums for them.

A checkpoint of blocks loads into any other way to cut the same tables. A sum is that of a row's mean square
gradient over the block's columns, so the sum of blocks that are merged is their mean by width, exactly; parts
of a block that is cut each take its sum, which is then the mean over more columns than theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dhen.inputs.features import EmbeddingTables
from trials.optim.rowwise_adagrad import RowWiseAdagrad


class Block(NamedTuple):
    """Columns `first_column` up to `first_column + columns` of all rows of a table."""

    table: str
    first_column: int
    columns: int

    @property
    def name(self) -> str:
        """In checkpoints, after `weight.` or `sum.`."""
        return f"{self.table}.{self.first_column}-{self.first_column + self.columns}"

    def shared_columns(self, other: Block) -> tuple[int, int]:
        """First and one past the last column that both have; empty where the second is not above the first."""
        if self.table != other.table:
            return 0, 0
        ends = (self.first_column + self.columns, other.first_column + other.columns)
        return max(self.first_column, other.first_column), min(ends)


class HeldBlock(NamedTuple):
    """A block with its numbers, which are views of what trains: writing to them changes the tables."""

    block: Block
    weight_RC: Tensor
    sum_R: Tensor
    """Of row-wise Adagrad, fp32."""

    @property
    def held_bytes(self) -> int:
        """Weights and optimizer state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weight_RC, self.sum_R))


def whole_blocks(tables: Sequence[EmbeddingTables], optimizer: RowWiseAdagrad) -> list[HeldBlock]:
    """Each table of these as one block, with what its optimizer has of it."""
    held = []
    for each in tables:
        rows, dim = [table.rows for table in each.tables], each.weight.shape[1]
        weights = torch.split(each.weight.detach(), rows)
        sums = torch.split(optimizer.state_of(each.weight)["sum"], rows)
        held += [
            HeldBlock(Block(table.name, 0, dim), weight_RD, sum_R)
            for table, weight_RD, sum_R in zip(each.tables, weights, sums, strict=True)
        ]
    return held


State = dict[str, Tensor]


def state_of(held: Sequence[HeldBlock]) -> State:
    """For `torch.distributed.checkpoint`: the blocks of this rank, as views (loading into them is loading)."""
    weights = {f"weight.{block.name}": weight_RC for block, weight_RC, _ in held}
    return weights | {f"sum.{block.name}": sum_R for block, _, sum_R in held}


def state_to_load(saved: Iterable[str], held: Sequence[HeldBlock]) -> State:
    """What to load of a checkpoint with the keys `saved`, whatever its blocks are: the blocks of this rank where
    they were saved alike, else tensors of their own for all that share columns with one."""
    mine, wanted = state_of(held), {}
    for key in saved:
        kind, _, name = key.partition(".")
        if key in mine:
            wanted[key] = mine[key]
        elif kind in ("weight", "sum"):
            theirs = _parse(name)
            for block, weight_RC, _ in held:
                start, stop = block.shared_columns(theirs)
                if start < stop:
                    shape = weight_RC.shape[:1] if kind == "sum" else (len(weight_RC), theirs.columns)
                    dtype = torch.float32 if kind == "sum" else weight_RC.dtype
                    wanted[key] = torch.empty(shape, dtype=dtype, device=weight_RC.device)
    return wanted


@torch.no_grad()
def load_state(state: Mapping[str, Tensor], held: Sequence[HeldBlock]) -> None:
    """Puts loaded blocks, cut in any way, into those of this rank."""
    for block, weight_RC, sum_R in held:
        mine = state.get(f"weight.{block.name}")
        if mine is None:
            _assemble(state, block, weight_RC, sum_R)
        elif mine is not weight_RC:
            weight_RC.copy_(mine)
            sum_R.copy_(state[f"sum.{block.name}"])


def _assemble(state: Mapping[str, Tensor], block: Block, weight_RC: Tensor, sum_R: Tensor) -> None:
    total_R, columns = torch.zeros_like(sum_R), 0
    for key, values in state.items():
        kind, _, name = key.partition(".")
        if kind != "weight":
            continue
        theirs = _parse(name)
        start, stop = block.shared_columns(theirs)
        if start < stop:
            mine, other = block.first_column, theirs.first_column
            weight_RC[:, start - mine : stop - mine] = values[:, start - other : stop - other]
            total_R.add_(state[f"sum.{name}"], alpha=stop - start)
            columns += stop - start
    assert columns == block.columns, f"the checkpoint lacks columns of {block}"
    sum_R.copy_(total_R.div_(columns))


def _parse(name: str) -> Block:
    table, _, columns = name.rpartition(".")
    start, stop = columns.split("-")
    return Block(table, int(start), int(stop) - int(start))
