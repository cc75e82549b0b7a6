"""How a layer joins the outputs of its interaction modules (DHEN paper, section 3.1, equation 1).

The paper's: concat keeps all (k modules of l embeddings give k l); sum and weighted sum add them up (l).

Beyond it, all mapping k outputs u_BLD to l embeddings: `gated` is the mixture of experts' gate (arXiv 1701.06538,
equation 1) with modules for experts, as in MMoE; `attention` is attentional pooling (AFM, arXiv 1708.04617,
equations 5 and 6) over modules; `bilinear` is the sum with the bilinear interactions of all ordered pairs of
modules beside it (as FiBiNET's of embeddings, arXiv 1905.09433, equation 5).

Shapes: B examples, K modules, L embeddings out of each, D their dimension, V = L D numbers of them all; M
embeddings of the layer's input.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.cost import SOFTMAX_FLOPS, Costs, elementwise_cost, linear_cost, product_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.tape import Tape
from dhen.values import Value


@dataclass(frozen=True, kw_only=True)
class EnsembleShape:
    """Where an ensemble stands."""

    modules: int
    """k, outputs to join."""
    out: int
    """L, embeddings of each."""
    embeddings: int
    """M, embeddings that the modules see."""
    dim: int
    """D, length of each."""


class EnsembleConfig(Value):
    """One way to join k outputs u_BLD. `kind` names it in `ENSEMBLES`."""

    kind: str

    def embeddings(self, modules: int, out: int) -> int:
        """Embeddings of the joined output, for `modules` outputs of `out` embeddings each."""
        del modules
        return out

    @abstractmethod
    def build(self, shape: EnsembleShape) -> nn.Module:
        """The module: forward maps a list of k tensors u_BLD, and x_BMD, to one tensor."""

    @abstractmethod
    def cost(self, shape: EnsembleShape) -> Costs:
        """FLOPs and parameters per example."""

    @abstractmethod
    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """Writes down what joining the outputs u_BLD does; the joined tensor."""


# The paper's ensembles.


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


# Weights from the instance, weights from the outputs, products of outputs.


class GatedSumConfig(EnsembleConfig):
    """The outputs added up with weights from the instance: y = sum_i softmax(W x + b)_i u_i, x flattened."""

    kind: Literal["gated"] = "gated"

    def build(self, shape: EnsembleShape) -> nn.Module:
        """[u_BLD], x_BMD -> y_BLD."""
        return GatedSum(shape)

    def cost(self, shape: EnsembleShape) -> Costs:
        """The gate and the mixture."""
        return (
            linear_cost("gate", shape.embeddings * shape.dim, shape.modules),
            elementwise_cost("gate.softmax", shape.modules, flops_each=SOFTMAX_FLOPS),
            product_cost("mixture", 1, shape.modules, shape.out * shape.dim),
        )

    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """The gate, the outputs side by side, the mixture."""
        logits = linear_tape(tape, x, shape.embeddings * shape.dim, shape.modules)
        gates = tape.operation(shape.modules, [logits], saves_output=True)
        stacked = tape.concat(outputs)
        mixed = tape.operation(shape.out * shape.dim, [gates, stacked], saves=[gates, stacked])
        tape.refer(*outputs, stacked)
        return mixed


class AttentionSumConfig(EnsembleConfig):
    """The outputs added up with weights from themselves, for each embedding:
    y = sum_i softmax_i(h ReLU(W u_i + b)) u_i."""

    kind: Literal["attention"] = "attention"
    width: int = Field(default=16, gt=0, le=65_536)
    """Width of the hidden layer that scores an embedding."""

    def build(self, shape: EnsembleShape) -> nn.Module:
        """[u_BLD], x_BMD -> y_BLD."""
        return AttentionSum(shape.dim, self.width)

    def cost(self, shape: EnsembleShape) -> Costs:
        """The scores, softmax over modules, the weighted sum."""
        positions = shape.modules * shape.out
        return (
            linear_cost("hidden", shape.dim, self.width, positions=positions),
            elementwise_cost("hidden.relu", positions * self.width),
            linear_cost("score", self.width, 1, positions=positions, bias=False),
            elementwise_cost("softmax", positions, flops_each=SOFTMAX_FLOPS),
            elementwise_cost("weighted_sum", positions * shape.dim, flops_each=2),
        )

    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """The outputs side by side, their scores, the weighted sum."""
        positions = shape.modules * shape.out
        values = positions * shape.dim
        stacked = tape.concat(outputs)
        hidden = linear_tape(tape, stacked, shape.dim, self.width, positions=positions, relu=True)
        scores = linear_tape(tape, hidden, self.width, 1, positions=positions, bias=False)
        weights = tape.operation(positions, [scores], saves_output=True)
        weighted = tape.operation(
            values, [stacked, weights], saves=[stacked, weights], backward_running=tape.held(values)
        )
        total = tape.operation(shape.out * shape.dim, [weighted], passes=True)
        tape.refer(*outputs, stacked, weights)
        return total


class BilinearSumConfig(EnsembleConfig):
    """The outputs added up, and the products of all pairs beside: y = sum_i u_i + sum_(i != j) (u_i W) * u_j."""

    kind: Literal["bilinear"] = "bilinear"

    def build(self, shape: EnsembleShape) -> nn.Module:
        """[u_BLD], x_BMD -> y_BLD."""
        return BilinearSum(shape.dim)

    def cost(self, shape: EnsembleShape) -> Costs:
        """W on every output, sums and products."""
        positions = shape.modules * shape.out
        return (
            linear_cost("w", shape.dim, shape.dim, positions=positions, bias=False),
            elementwise_cost("products", positions * shape.dim, flops_each=4),
            elementwise_cost("sum", shape.out * shape.dim, flops_each=3),
        )

    def write(self, tape: Tape, outputs: Sequence[int], x: int, shape: EnsembleShape) -> int:
        """The outputs side by side, W on them, the product of sums, the sum of products."""
        joined, positions = shape.out * shape.dim, shape.modules * shape.out
        stacked = tape.concat(outputs)
        turned = linear_tape(tape, stacked, shape.dim, shape.dim, positions=positions, bias=False)
        total = tape.operation(joined, [stacked], passes=True)
        total_turned = tape.operation(joined, [turned], passes=True)
        own = tape.operation(positions * shape.dim, [turned, stacked], saves=[turned, stacked])
        own = tape.operation(joined, [own], passes=True)
        product = tape.operation(
            joined,
            [total_turned, total],
            saves=[total_turned, total],
            view=True,
            backward_running=tape.held(joined),
        )
        y = tape.add(tape.add(total, product), own)
        tape.refer(*outputs, stacked, turned, total, total_turned, own)
        return y


class GatedSum(nn.Module):
    """Weights from what the modules see."""

    def __init__(self, shape: EnsembleShape) -> None:
        super().__init__()
        self.gate = Linear(shape.embeddings * shape.dim, shape.modules)

    def forward(self, outputs: list[Tensor], x_BMD: Tensor) -> Tensor:
        """[u_BLD], x_BMD -> y_BLD."""
        gates_BK = self.gate(x_BMD.flatten(1)).softmax(dim=1)
        stacked_BKV = torch.stack(outputs, dim=1).flatten(2)
        return torch.bmm(gates_BK.unsqueeze(1), stacked_BKV).view_as(outputs[0])


class AttentionSum(nn.Module):
    """Weights from the outputs."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.score = nn.Sequential(Linear(dim, width, relu=True), Linear(width, 1, bias=False))

    def forward(self, outputs: list[Tensor], x_BMD: Tensor) -> Tensor:
        """[u_BLD] -> y_BLD."""
        stacked_BKLD = torch.stack(outputs, dim=1)
        weights_BKL1 = self.score(stacked_BKLD).softmax(dim=1)
        total_BLD: Tensor = (stacked_BKLD * weights_BKL1).sum(dim=1)
        return total_BLD


class BilinearSum(nn.Module):
    """The sum and the products."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = Linear(dim, dim, bias=False)

    def forward(self, outputs: list[Tensor], x_BMD: Tensor) -> Tensor:
        """[u_BLD] -> y_BLD: products of all pairs are the product of sums less those of an output with itself."""
        stacked_BKLD = torch.stack(outputs, dim=1)
        turned_BKLD = self.w(stacked_BKLD)
        total_BLD, total_turned_BLD = stacked_BKLD.sum(dim=1), turned_BKLD.sum(dim=1)
        own_BLD = (turned_BKLD * stacked_BKLD).sum(dim=1)
        joined_BLD: Tensor = torch.addcmul(total_BLD, total_turned_BLD, total_BLD) - own_BLD
        return joined_BLD
