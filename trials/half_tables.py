"""Embedding tables stored in fp16: what is looked up is fp32, and so are its gradients.

Gradients of a mean over thousands of examples would vanish in fp16, whose smallest number is 6e-8. The update is
the optimizer's business (`trials.row_wise_adagrad`, with `trials.stochastic_rounding`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.batch import FeatureBatch
from dhen.features import EmbeddingTables


class HalfTables(EmbeddingTables):
    """The same tables, with half the bytes."""

    def __init__(self, tables: EmbeddingTables) -> None:
        """Of their weights, rounded to the nearest."""
        nn.Module.__init__(self)  # the parent's would draw fresh weights
        self.bag_offsets = tables.bag_offsets
        self.register_buffer("row_offsets", tables.row_offsets, persistent=False)
        self.weight = nn.Parameter(tables.weight.detach().half())
        self.weight.grad_dtype = torch.float32

    def forward(self, batch: FeatureBatch) -> list[Tensor]:
        """As the parent's."""
        looked_up = []
        if self.row_offsets.numel():
            rows_BT = batch.ids_BT + self.row_offsets
            looked_up.append(self._rows_of(rows_BT.flatten()).view(*rows_BT.shape, self.weight.shape[1]))
        for rows_N, (_, offsets_B) in zip(self._bag_rows(batch), batch.bags, strict=True):
            places_N = torch.arange(len(rows_N), device=rows_N.device)
            bag_BD = F.embedding_bag(places_N, self._rows_of(rows_N), offsets_B.long(), mode="mean")
            looked_up.append(bag_BD.unsqueeze(1))
        return looked_up

    def _rows_of(self, rows_N: Tensor) -> Tensor:
        found: Tensor = _Rows.apply(self.weight, rows_N)  # type: ignore[no-untyped-call]
        return found


class _Rows(torch.autograd.Function):
    """Rows of an fp16 matrix as fp32; the gradient is sparse, as `F.embedding`'s."""

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
    """Puts `HalfTables` in the place of a model's tables, where they are not yet."""
    for name, module in list(model.named_modules()):
        if isinstance(module, EmbeddingTables):
            model.set_submodule(name, in_half(module))


def in_half(tables: EmbeddingTables) -> HalfTables:
    """The same tables in fp16; themselves, where they are."""
    return tables if isinstance(tables, HalfTables) else HalfTables(tables)
