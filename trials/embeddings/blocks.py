"""Embedding tables in parts: some columns of all rows of a table, and row-wise Adagrad's sums for them.

A checkpoint of such parts loads into any other way to cut the same tables. A sum adds up a row's mean square
gradient over the part's columns, so the sum of merged parts is exactly the mean of their sums by width. Where a
part is cut further, each piece takes its sum, which is then the mean over more columns than the piece has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dhen.inputs.features import EmbeddingTables
from trials.optim.rowwise_adagrad import RowWiseAdagrad


class Block(NamedTuple):
    """A part of a table: its columns `first_column` up to `first_column + columns`, of all rows."""

    table: str
    first_column: int
    columns: int

    @property
    def name(self) -> str:
        """The part's name in checkpoints, after `weight.` or `sum.`."""
        return f"{self.table}.{self.first_column}-{self.first_column + self.columns}"

    def shared_columns(self, block: Block) -> tuple[int, int]:
        """Returns the first and one past the last column that both parts have; empty where the second is not above
        the first."""
        if self.table != block.table:
            return 0, 0
        ends = (self.first_column + self.columns, block.first_column + block.columns)
        return max(self.first_column, block.first_column), min(ends)


class HeldBlock(NamedTuple):
    """A part of a table with its numbers, which are views of what trains: writing to them changes the tables."""

    block: Block
    weight_RC: Tensor
    sum_R: Tensor
    """Row-wise Adagrad's sum for each row, in fp32."""

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weight_RC, self.sum_R))


def whole_blocks(tables: Sequence[EmbeddingTables], optimizer: RowWiseAdagrad) -> list[HeldBlock]:
    """Returns each of these tables as one part, with what its optimizer has of it."""
    return blocks_of(tables, [optimizer.state_of(matrix.weight)["sum"] for matrix in tables])


def blocks_of(tables: Sequence[EmbeddingTables], sums: Sequence[Tensor]) -> list[HeldBlock]:
    """Returns each of these tables as one part, with its rows of the sums of each matrix."""
    parts = []
    for matrix, sum_R in zip(tables, sums, strict=True):
        rows, dim = [table.rows for table in matrix.tables], matrix.weight.shape[1]
        weights, sums_R = torch.split(matrix.weight.detach(), rows), torch.split(sum_R, rows)
        parts += [
            HeldBlock(Block(table.name, 0, dim), weight_RD, its_sum_R)
            for table, weight_RD, its_sum_R in zip(matrix.tables, weights, sums_R, strict=True)
        ]
    return parts


State = dict[str, Tensor]


def state_of(held_parts: Sequence[HeldBlock]) -> State:
    """Returns the parts of this rank for `torch.distributed.checkpoint`, as views (loading into them changes what
    trains)."""
    weights = {f"weight.{part.name}": weight_RC for part, weight_RC, _ in held_parts}
    return weights | {f"sum.{part.name}": sum_R for part, _, sum_R in held_parts}


def state_to_load(saved: Iterable[str], held_parts: Sequence[HeldBlock]) -> State:
    """Returns what to load of a checkpoint with the keys `saved`, however its tables are cut: the parts of this
    rank where they were saved alike, else tensors of their own for all saved parts that share columns with
    them."""
    own_state, to_load = state_of(held_parts), {}
    for key in saved:
        kind, _, name = key.partition(".")
        if key in own_state:
            to_load[key] = own_state[key]
        elif kind in ("weight", "sum"):
            saved_part = _parse(name)
            for part, weight_RC, _ in held_parts:
                start, stop = part.shared_columns(saved_part)
                if start < stop:
                    shape = weight_RC.shape[:1] if kind == "sum" else (len(weight_RC), saved_part.columns)
                    dtype = torch.float32 if kind == "sum" else weight_RC.dtype
                    to_load[key] = torch.empty(shape, dtype=dtype, device=weight_RC.device)
    return to_load


def sums_of(saved: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns the sums (R) of a part by its name, of saved ones whose tables may be cut otherwise."""
    if f"sum.{name}" in saved:
        return saved[f"sum.{name}"]
    target, total_R = _parse(name), None
    for key, sum_R in saved.items():
        kind, _, other = key.partition(".")
        if kind == "sum":
            start, stop = target.shared_columns(_parse(other))
            if start < stop:
                total_R = torch.zeros_like(sum_R) if total_R is None else total_R
                total_R.add_(sum_R, alpha=stop - start)
    assert total_R is not None, f"no sums of {target}"
    return total_R.div_(target.columns)


@torch.no_grad()
def load_state(state: Mapping[str, Tensor], held_parts: Sequence[HeldBlock]) -> None:
    """Puts loaded parts, cut in any way, into those of this rank."""
    for part, weight_RC, sum_R in held_parts:
        loaded = state.get(f"weight.{part.name}")
        if loaded is None:
            _assemble(state, part, weight_RC, sum_R)
        elif loaded is not weight_RC:
            weight_RC.copy_(loaded)
            sum_R.copy_(state[f"sum.{part.name}"])


def _assemble(state: Mapping[str, Tensor], target: Block, weight_RC: Tensor, sum_R: Tensor) -> None:
    columns = 0
    for key, values in state.items():
        kind, _, name = key.partition(".")
        if kind != "weight":
            continue
        saved_part = _parse(name)
        start, stop = target.shared_columns(saved_part)
        if start < stop:
            target_first, source_first = target.first_column, saved_part.first_column
            weight_RC[:, start - target_first : stop - target_first] = values[
                :, start - source_first : stop - source_first
            ]
            columns += stop - start
    assert columns == target.columns, f"the checkpoint lacks columns of {target}"
    sum_R.copy_(sums_of(state, target.name))


def _parse(name: str) -> Block:
    table, _, columns = name.rpartition(".")
    start, stop = columns.split("-")
    return Block(table, int(start), int(stop) - int(start))
