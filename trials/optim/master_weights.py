"""The dense part in mixed precision: fp32 master weights for the optimizer, a copy that the model computes with.

As in Mixed Precision Training (arXiv 1710.03740) and FSDP's `param_dtype`, without autocast's casts at every
operation. All dense weights lie one after another in one tensor, so casting, gathering gradients and the
optimizer's update are one operation each, however many layers there are. Tables keep fp32 and are not
part of it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.inputs.features import EmbeddingTables
from trials.cluster.machine import Precision
from trials.storage.weights_file import Weights

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIGNMENT_BYTES = 16
"""Compiled kernels of a GPU take for granted that a weight begins at a multiple of it, where that of the layer did
for which they were compiled; another layer of the same shapes shares them."""


class Range(NamedTuple):
    """Weights that lie one after another in `MasterWeights.flat`."""

    start: int
    """The number of weights before, without what lies between them to align them."""
    place: slice
    """The place of these weights in `flat`."""


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns all parameters but the embedding tables, by name."""
    tables = {id(table.weight) for table in embedding_tables(model)}
    return {name: p for name, p in model.named_parameters() if id(p) not in tables}


def embedding_tables(model: nn.Module) -> list[EmbeddingTables]:
    """Returns the model's tables (one module where a log has any)."""
    return [module for module in model.modules() if isinstance(module, EmbeddingTables)]


def compute_in(model: nn.Module, precision: Precision) -> nn.Module:
    """Returns the model with its dense part cast to the precision it computes in, to evaluate it."""
    for parameter in dense_parameters(model).values():
        parameter.data = parameter.data.to(DTYPES[precision])
    return model


def all_finite(values: Tensor) -> bool:
    """Tells whether no number is NaN or infinite, with no memory for it: `isfinite` takes half as much again as
    the weights themselves."""
    return values.numel() == 0 or all(bool(end.isfinite()) for end in torch.aminmax(values.detach()))


class MasterWeights:
    """The dense weights of a model that is being trained."""

    def __init__(self, model: nn.Module, precision: Precision, *, aligned: bool = False) -> None:
        """Takes the model's weights over: its parameters become views of one tensor in `precision`, `aligned` for
        compiled kernels, with zeros between them."""
        self._model, self._dense = model, dense_parameters(model)
        dtype = DTYPES[precision]
        multiple = ALIGNMENT_BYTES // dtype.itemsize if aligned else 1
        # the stage of a pipeline may have none, and then an empty vector
        values = [p.detach().flatten() for p in self._dense.values()] or [torch.zeros(0)]
        self._lengths = [len(each) for each in values]
        self._gaps = [each.new_zeros(-len(each) % multiple, dtype=dtype) for each in values]
        self.flat = nn.Parameter(torch.cat(self._with_gaps(values)))
        """All dense weights in fp32, which the optimizer updates; their gradient is set by `gather_gradients`."""
        self._compute = self.flat.detach().to(dtype)
        for parameter, view in zip(self._dense.values(), self._views(self._compute), strict=False):
            parameter.data = view

    @property
    def length(self) -> int:
        """Number of dense weights."""
        return sum(self._lengths)

    @property
    def ranges(self) -> list[Range]:
        """Returns where in `flat` the weights are: one range, or one for each of them where gaps align them."""
        if self.flat.numel() == self.length:
            return [Range(0, slice(0, self.length))]
        starts, places = accumulate(self._lengths, initial=0), accumulate(self._places, initial=0)
        return [
            Range(start, slice(place, place + length))
            for start, place, length in zip(starts, places, self._lengths, strict=False)
        ]

    def gather_gradients(self, *, in_buckets: bool = False) -> None:
        """Turns the model's gradients into the gradient of `flat`; the model's own are dropped.

        Gradients that lie in a collective's buckets stay there, set to zero, so that the next step's add up in
        place: micro-batches would otherwise need as much memory again.
        """
        gradients = [_flat_gradient(p) for p in self._dense.values()]
        self.flat.grad = torch.empty_like(self.flat)
        if gradients:
            torch.cat(self._with_gaps(gradients), out=self.flat.grad)
        if in_buckets:
            torch._foreach_zero_(gradients)
            return
        for parameter in self._dense.values():
            parameter.grad = None

    def publish(self) -> None:
        """Copies `flat` to what the model computes with, after the update; the gradient of `flat` is freed.

        In fp32 the model computes with `flat` itself.
        """
        self.flat.grad = None
        if self._compute.dtype is not self.flat.dtype:
            self._compute.copy_(self.flat.detach())

    def weights(self) -> Weights:
        """Returns a copy of the model's weights on the CPU, the dense ones in fp32."""
        masters = dict(zip(self._dense, self._views(self.flat.detach()), strict=True))
        return {
            name: masters.get(name, tensor).detach().to("cpu", copy=True)
            for name, tensor in self._model.state_dict().items()
        }

    @property
    def _places(self) -> list[int]:
        """Length of each weight with the gap behind it."""
        return [length + len(gap) for length, gap in zip(self._lengths, self._gaps, strict=True)]

    def _with_gaps(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors, each with the zeros behind it."""
        pairs = zip(tensors, self._gaps, strict=True)
        return [each for tensor, gap in pairs for each in ((tensor, gap) if len(gap) else (tensor,))]

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(torch.split(flat, self._places), self._lengths, self._dense.values(), strict=False)
        return [piece[:length].view_as(parameter) for piece, length, parameter in pieces]


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
