"""Ensembles beyond the paper's: weights from the instance, weights from the outputs, products of outputs.

All map k outputs u_BLD to l embeddings. `gated` is the mixture of experts' gate (arXiv 1701.06538, equation 1)
with modules for experts, as in MMoE; `attention` is attentional pooling (AFM, arXiv 1708.04617, equations 5 and 6)
over modules; `bilinear` is the sum with the bilinear interactions of all ordered pairs of modules beside it (as
FiBiNET's of embeddings, arXiv 1905.09433, equation 5).

Shapes: B examples, K modules, L embeddings out of each, D their dimension, V = L D numbers of them all; M
embeddings of the layer's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.cost import SOFTMAX_FLOPS, Costs, elementwise_cost, linear_cost, product_cost
from dhen.ensembles.base import EnsembleConfig, EnsembleShape
from dhen.ops.linear import Linear, linear_tape
from dhen.tape import Tape


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
