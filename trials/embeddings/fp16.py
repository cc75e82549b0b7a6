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

from dhen.batch import FeatureBatch
from dhen.inputs.features import EmbeddingTables, Tables


class HalfTables(EmbeddingTables):
    """Embedding tables with half the bytes of the tables they are made from."""

    def __init__(self, tables: EmbeddingTables) -> None:
        """Takes the tables' weights over, rounded to the nearest."""
        nn.Module.__init__(self)  # the parent's would draw fresh weights
        self.tables, self.bags, self.bag_offsets = tables.tables, tables.bags, tables.bag_offsets
        self.register_buffer("row_offsets", tables.row_offsets, persistent=False)
        self.ids, self.slots = tables.ids, tables.slots
        self.weight = nn.Parameter(tables.weight.detach().half())
        self.weight.grad_dtype = torch.float32

    def forward(self, batch: FeatureBatch) -> list[Tensor]:
        """Looks embeddings up as `EmbeddingTables` does."""
        looked_up = []
        if self.row_offsets.numel():
            rows_BT = self._categorical_rows(batch)
            looked_up.append(
                self._rows_of(self._held(rows_BT).flatten()).view(*rows_BT.shape, self.weight.shape[1])
            )
        for rows_N, offsets_B in self._bag_rows(batch):
            places_N = torch.arange(len(rows_N), device=rows_N.device)
            bag_BD = F.embedding_bag(
                places_N, self._rows_of(self._held(rows_N)), offsets_B.long(), mode="mean"
            )
            looked_up.append(bag_BD.unsqueeze(1))
        return looked_up

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
