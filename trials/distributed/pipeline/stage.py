"""One stage of a pipeline: some of a DHEN's layers, with features below the first and heads above the last.

What a stage needs beside the embeddings that reach it is there before the schedule begins (`MicroBatches`): all
ranks of a pipeline read the same examples, so that raw numeric inputs and labels need not be sent, and the
looked-up embeddings are leaves, whose gradients stay with them however the schedule cuts backward into passes.

Shapes: N rows that reach a stage (B examples, or B K of K members), M embeddings, D their dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dhen.config import DhenConfig
from dhen.dhen_model import DhenModel
from trials.distributed.table_split import DenseInputs


class MicroBatches:
    """The micro-batches of the running step, by their numbers."""

    def __init__(self) -> None:
        self.inputs: Sequence[DenseInputs] = ()


class Stage(nn.Module):
    """(x_NMD of the stage before, number of a micro-batch) -> y_NM'D for the next stage, or the heads' answer.

    The first stage takes no notice of x. The modules are the model's own.
    """

    def __init__(
        self, model: DhenModel, layers: range, micro_batches: MicroBatches, dtype: torch.dtype
    ) -> None:
        """Takes the layers of a model that `keep_layers` has cut; `dtype` is what it computes in."""
        super().__init__()
        self._micro_batches, self._dtype = micro_batches, dtype
        of_model = list(model.layers.named_children())
        self.layers = nn.ModuleList(layer for name, layer in of_model if int(name) in layers)
        self.features = model.features if layers.start == 0 else None
        heads = getattr(model, "head", None) if layers.stop == layer_count(model) else None
        self.heads = nn.ModuleList([model.head, model.logit]) if heads is not None else None
        self._answer = model.answer

    def forward(self, x: Tensor, *, number: Tensor) -> Tensor:
        """The stage's part of the model on one micro-batch."""
        inputs = self._micro_batches.inputs[int(number)]
        return self.run(x, inputs)

    def run(self, x: Tensor, inputs: DenseInputs) -> Tensor:
        """As `forward`, on inputs that are given."""
        if self.features is not None:
            x = self.features(inputs, self._dtype)
        elif torch.is_grad_enabled():
            x = _ContiguousGradient.apply(x)  # type: ignore[no-untyped-call]
        raw_BK = inputs.numeric_BK.to(self._dtype)
        for layer in self.layers:
            x = layer(x, raw_BK)
        if self.heads is not None:
            return self._answer(x)
        # what is sent lies in one piece; torch's schedules detach it in place, which a view refuses
        y = x.contiguous()
        return y if y._base is None else y.clone()


class _ContiguousGradient(torch.autograd.Function):
    """The same tensor, whose gradient lies in one piece, as what is sent has to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def keep_layers(model: DhenModel, stages: Sequence[range]) -> None:
    """Takes all but these layers out of the model, and what lies below the first and above the last where those
    are not among them. What stays keeps its names."""
    kept = {index for layers in stages for index in layers}
    count = len(model.layers)
    layers = {str(index): layer for index, layer in enumerate(model.layers) if index in kept}
    model.layers = nn.ModuleDict(layers)  # type: ignore[assignment]
    model.layer_count = count  # type: ignore[assignment]
    if 0 not in kept:
        model.features = None  # type: ignore[assignment]
    if count - 1 not in kept:
        model.head = model.logit = None  # type: ignore[assignment]


def layer_count(model: nn.Module) -> int:
    """Returns the number of layers that a model had before it was cut."""
    count = getattr(model, "layer_count", None)
    return count if isinstance(count, int) else len(model.layers)  # type: ignore[arg-type]


def boundary(config: DhenConfig, layer: int, examples: int) -> tuple[int, int, int]:
    """Returns the shape (N, M, D) of what a layer puts out for so many examples."""
    parted = config.members > 1 and layer >= config.members_from
    rows = examples * (config.members if parted else 1)
    return rows, config.layers[layer].embeddings, config.embedding_dim
