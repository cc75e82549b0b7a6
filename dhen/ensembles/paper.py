"""How a layer joins the outputs of its interaction modules (DHEN paper, section 3.1, equation 1).

Concat keeps all (k modules of l embeddings give k l); sum and weighted sum add them up (l). Those
beyond the paper are in `dhen/ensembles/mixing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dhen.cost import Costs, elementwise_cost
from dhen.ensembles.base import EnsembleConfig, EnsembleShape
from dhen.tape import Tape


class ConcatConfig(EnsembleConfig):
    """The modules' outputs one after another: the layer puts out all their embeddings."""

    kind: Literal["concat"] = "concat"

    def embeddings(self, modules: int, out: int) -> int:
        """k l."""
        return modules * out

    def build(self, shape: EnsembleShape) -> nn.Module:
        """[u_BLD] -> y_B(kL)D."""
        return Concat()

    def cost(self, shape: EnsembleShape) -> Costs:
        """Nothing is computed."""
        return ()

    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """One copy."""
        return tape.concat(outputs)


class SumConfig(EnsembleConfig):
    """The modules' outputs added up."""

    kind: Literal["sum"] = "sum"

    def build(self, shape: EnsembleShape) -> nn.Module:
        """[u_BLD] -> y_BLD."""
        return Sum()

    def cost(self, shape: EnsembleShape) -> Costs:
        """k - 1 additions a value."""
        return (elementwise_cost("sum", (shape.modules - 1) * shape.out * shape.dim),)

    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """Sums of two; all outputs are alive until the last."""
        total = outputs[0]
        for output in outputs[1:]:
            total = tape.add(total, output)
        tape.refer(*outputs)
        return total


class WeightedSumConfig(EnsembleConfig):
    """The modules' outputs added up with one learned weight per module, 1 at the start."""

    kind: Literal["weighted_sum"] = "weighted_sum"

    def build(self, shape: EnsembleShape) -> nn.Module:
        """[u_BLD] -> y_BLD."""
        return WeightedSum(shape.modules)

    def cost(self, shape: EnsembleShape) -> Costs:
        """A product a value, and k - 1 additions."""
        values = (2 * shape.modules - 1) * shape.out * shape.dim
        return (elementwise_cost("weighted_sum", values, parameters=shape.modules),)

    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """Products kept for no longer than their sum; each output is saved for its weight's gradient."""
        total = None
        for output in outputs:
            values = tape.values(output)
            weights = [(len(outputs), 1)] if total is None else []
            weighted = tape.operation(
                values, [output], saves=[output], parameters=weights, backward_running=tape.held(values)
            )
            total = weighted if total is None else tape.add(total, weighted)
        assert total is not None
        tape.refer(*outputs)
        return total


class Concat(nn.Module):
    """Along the embeddings."""

    def forward(self, outputs: list[Tensor], x_BMD: Tensor) -> Tensor:
        """[u_BLD] -> y_B(kL)D."""
        return torch.cat(outputs, dim=1)


class Sum(nn.Module):
    """All with weight one."""

    def forward(self, outputs: list[Tensor], x_BMD: Tensor) -> Tensor:
        """[u_BLD] -> y_BLD."""
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


class WeightedSum(nn.Module):
    """One learned weight per module."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(modules))

    def forward(self, outputs: list[Tensor], x_BMD: Tensor) -> Tensor:
        """[u_BLD] -> y_BLD."""
        total = self.weights[0] * outputs[0]
        for weight, output in zip(self.weights[1:], outputs[1:], strict=True):
            total = total + weight * output
        return total
