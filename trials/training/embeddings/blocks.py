"""Embedding tables in parts: some columns of all rows of a table, and row-wise Adagrad's sums for them.

A checkpoint of such parts loads into any other way to cut the same tables. A sum adds up a row's mean square
gradient over the part's columns, so the sum of merged parts is exactly the mean of their sums by width. If
a part is cut further, each piece takes its sum, which is then the mean over more columns than the piece has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.inputs.features import EmbeddingTables, TableLookups, Tables


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
        """Returns the first and one past the last column that both parts have; empty if the second is not above
        the first."""
        if self.table != block.table:
            return 0, 0
        ends = (self.first_column + self.columns, block.first_column + block.columns)
        return max(self.first_column, block.first_column), min(ends)


class TableBlock(NamedTuple):
    """A part of a table with its numbers, which are views of what trains: writing to them changes the tables."""

    block: Block
    weight_RC: Tensor
    sum_R: Tensor
    """Row-wise Adagrad's sum for each row, in fp32."""

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weight_RC, self.sum_R))


def blocks_of(tables: Iterable[EmbeddingTables], sums: Iterable[Tensor]) -> list[TableBlock]:
    """Returns each of these tables as one part, with its rows of the sums of each matrix."""
    parts = []
    for matrix, sum_R in zip(tables, sums, strict=True):
        rows, dim = [table.rows for table in matrix.tables], matrix.weight.shape[1]
        weights, sums_R = torch.split(matrix.weight.detach(), rows), torch.split(sum_R, rows)
        parts += [
            TableBlock(Block(table.name, 0, dim), weight_RD, its_sum_R)
            for table, weight_RD, its_sum_R in zip(matrix.tables, weights, sums_R, strict=True)
        ]
    return parts


State = dict[str, Tensor]


def state_of(held_parts: Sequence[TableBlock]) -> State:
    """Returns the parts of this rank for `torch.distributed.checkpoint`, as views (loading into them changes what
    trains)."""
    weights = {f"weight.{part.name}": weight_RC for part, weight_RC, _ in held_parts}
    return weights | {f"sum.{part.name}": sum_R for part, _, sum_R in held_parts}


def state_to_load(saved: Iterable[str], held_parts: Sequence[TableBlock]) -> State:
    """Returns what to load of a checkpoint with the keys `saved`, however its tables are cut: the parts of this
    rank if they were saved alike, else tensors of their own for all saved parts that share columns with
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
def load_state(state: Mapping[str, Tensor], held_parts: Sequence[TableBlock]) -> None:
    """Puts loaded parts, cut in any way, into those of this rank."""
    for part, weight_RC, sum_R in held_parts:
        loaded = state.get(f"weight.{part.name}")
        if loaded is weight_RC:
            continue
        if loaded is not None:
            weight_RC.copy_(loaded)
            sum_R.copy_(state[f"sum.{part.name}"])
            continue
        columns, first = 0, part.first_column  # the checkpoint has this table cut otherwise
        for key, values in state.items():
            kind, _, name = key.partition(".")
            if kind == "weight":
                saved_part = _parse(name)
                start, stop = part.shared_columns(saved_part)
                if start < stop:
                    source = slice(start - saved_part.first_column, stop - saved_part.first_column)
                    weight_RC[:, start - first : stop - first] = values[:, source]
                    columns += stop - start
        assert columns == part.columns, f"the checkpoint lacks columns of {part}"
        sum_R.copy_(sums_of(state, part.name))


def _parse(name: str) -> Block:
    table, _, columns = name.rpartition(".")
    start, stop = columns.split("-")
    return Block(table, int(start), int(stop) - int(start))


# Embedding tables stored in fp16: what is looked up is fp32, and so are its gradients.
#
# Gradients of a mean over thousands of examples would vanish in fp16, whose smallest number is 6e-8. The update
# is the optimizer's business (`trials.optim.rowwise_adagrad`).
#
# Shapes: B examples, T categorical tables, N ids looked up, R rows of a matrix, D dimension of embeddings.


class HalfTables(EmbeddingTables):
    """Embedding tables with half the bytes of the tables they are made from."""

    def __init__(self, tables: EmbeddingTables) -> None:
        """Takes the tables' weights over, rounded to the nearest."""
        TableLookups.__init__(self, tables.schema, tables.places)  # the parent's would draw fresh weights
        self.row_offsets, self.ids, self.slots = tables.row_offsets, tables.ids, tables.slots
        self.weight = nn.Parameter(tables.weight.detach().half())
        self.weight.grad_dtype = torch.float32

    def embedded(self, rows_BT: Tensor) -> Tensor:
        """See `EmbeddingTables`."""
        return self._rows_of(self._held(rows_BT).flatten()).view(*rows_BT.shape, self.weight.shape[1])

    def pooled(self, rows: Tensor, offsets_B: Tensor) -> Tensor:
        """See `EmbeddingTables`."""
        places = torch.arange(len(rows), device=rows.device)
        return F.embedding_bag(places, self._rows_of(self._held(rows)), offsets_B, mode="mean")

    def _rows_of(self, rows_N: Tensor) -> Tensor:
        rows_ND: Tensor = _Rows.apply(self.weight, rows_N)  # type: ignore[no-untyped-call]
        return rows_ND


class _Rows(torch.autograd.Function):
    """Rows of an fp16 matrix as fp32; the gradient is sparse, as that of `F.embedding`."""

    @staticmethod
    def forward(ctx: Any, weight_RD: Tensor, rows_N: Tensor) -> Tensor:
        ctx.save_for_backward(rows_N)
        ctx.shape = weight_RD.shape
        return weight_RD.index_select(0, rows_N).float()

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None]:
        (rows_N,) = ctx.saved_tensors
        indices = rows_N.unsqueeze(0)
        return torch.sparse_coo_tensor(indices, gradient_ND, ctx.shape, check_invariants=False), None


def store_tables_in_half(model: nn.Module) -> None:
    """Puts `HalfTables` in the place of a model's tables, if they are not in fp16 yet."""
    for name, module in list(model.named_modules()):
        if isinstance(module, EmbeddingTables):
            model.set_submodule(name, in_half(module))


def in_half(tables: Tables) -> Tables:
    """Returns the same tables in fp16; tables in fp16 already are returned themselves."""
    if isinstance(tables, HalfTables):
        return tables
    if isinstance(tables, EmbeddingTables):
        return HalfTables(tables)
    store_tables_in_half(tables)
    return tables
