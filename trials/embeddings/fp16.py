"""Embedding tables stored in fp16: what is looked up is fp32, and so are its gradients.

Gradients of a mean over thousands of examples would vanish in fp16, whose smallest number is 6e-8. The update is
the optimizer's business (`trials.optim.rowwise_adagrad`, with `trials.optim.stochastic_rounding`).

Shapes: B examples, T categorical tables, N ids looked up, R rows of a matrix, D dimension of embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.inputs.features import EmbeddingTables, TableLookups, Tables


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
    """Puts `HalfTables` in the place of a model's tables, where they are not in fp16 yet."""
    for name, module in list(model.named_modules()):
        if isinstance(module, EmbeddingTables):
            model.set_submodule(name, _in_half(module))


def in_half(tables: Tables) -> Tables:
    """Returns the same tables in fp16; tables in fp16 already are returned themselves."""
    if isinstance(tables, EmbeddingTables):
        return _in_half(tables)
    store_tables_in_half(tables)
    return tables


def _in_half(tables: EmbeddingTables) -> HalfTables:
    return tables if isinstance(tables, HalfTables) else HalfTables(tables)
