"""L2 decay of the rows looked up, for FBGEMM's fused optimizers on a CPU, whose fp32 kernels leave it out (1.8).

Every row of a batch is looked up once more, in a bag of its own behind the batch's; the gradient of that
embedding, which is the row's weights, is the decay times it. Kernels for GPUs, and for fp16, have L2 themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class CpuRowDecay:
    """Hooks on a lookup, which maps a KeyedJaggedTensor to the pooled embeddings of its keys (B, D)."""

    def __init__(self, lookup: nn.Module) -> None:
        self.decay = 0.0
        self._examples: int | None = None
        lookup.register_forward_pre_hook(self._add_rows)
        lookup.register_forward_hook(self._take_rows_off)

    def _add_rows(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        (features,) = inputs
        self._examples = None
        if not self.decay or not torch.is_grad_enabled() or not features.keys():
            return None
        self._examples = features.stride()
        return (_with_rows(features),)

    def _take_rows_off(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._examples is None:
            return output
        pooled: Tensor = _Decayed.apply(output, self._examples, self.decay)  # type: ignore[no-untyped-call]
        return pooled


def _with_rows(features: Any) -> Any:
    """Returns the ids with, behind the bags of each key, one bag for every id that they have; empty bags where a
    key has fewer ids."""
    ids_of = torch.split(features.values(), features.length_per_key())
    rows_of = [torch.unique(ids) for ids in ids_of]
    counts_F = torch.tensor([len(rows) for rows in rows_of])
    lengths_FB = features.lengths().view(len(ids_of), -1)
    more_FR = (torch.arange(int(counts_F.max())) < counts_F.unsqueeze(1)).to(lengths_FB.dtype)
    return type(features)(
        keys=features.keys(),
        values=torch.cat([ids for pair in zip(ids_of, rows_of, strict=True) for ids in pair]),
        lengths=torch.cat([lengths_FB, more_FR], dim=1).flatten(),
        stride=lengths_FB.shape[1] + more_FR.shape[1],
    )


class _Decayed(torch.autograd.Function):
    """Embeddings of the batch alone; the gradient of an embedding behind the batch's is `decay` times the
    embedding."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, examples: int, decay: float) -> Tensor:
        ctx.decay = decay
        ctx.save_for_backward(output[examples:])
        return output[:examples].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return torch.cat([gradient, ctx.decay * rows]), None, None
