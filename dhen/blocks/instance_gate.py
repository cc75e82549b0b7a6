"""PEPNet's gate on the embeddings (arXiv 2302.01115, equations 1 to 4): u = W (delta(x) * x).

delta = 2 sigmoid(W_2 ReLU(W_1 x + b_1) + b_2), one number between 0 and 2 for each value, from the instance. As in
the paper no gradient goes through the gate into the embeddings that it reads. PEPNet's gates read a domain or a
user beside them; here these are among the embeddings.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.tape import Tape


class InstanceGateConfig(DropoutBlockConfig):
    """A gate for every value, and the projection."""

    kind: Literal["instance_gate"] = "instance_gate"
    hidden: int = Field(default=64, gt=0, le=65_536)
    """Width of the gate's hidden layer."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            InstanceGate(shape.width, self.hidden, dropout=dropout),
            EmbeddingProjection(shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """The gate's two maps, the products, the projection."""
        width = shape.width
        return (
            linear_cost("gate0", width, self.hidden),
            elementwise_cost("gate0.relu", self.hidden),
            linear_cost("gate1", self.hidden, width),
            elementwise_cost("gate1.sigmoid", width, flops_each=4),
            elementwise_cost("product", width, flops_each=2),
            projection_cost("projection", shape.embeddings, shape.out, shape.dim),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The gate, whose input gets no gradient, the products, the projection."""
        width = shape.width
        hidden = linear_tape(tape, x, width, self.hidden, relu=True, p=dropout, x_needs_gradient=False)
        gate = tape.operation(width, [linear_tape(tape, hidden, self.hidden, width)], saves_output=True)
        doubled = tape.operation(width, [gate])
        gated = tape.operation(width, [x, doubled], saves=[x, doubled])
        return projection_tape(tape, gated, shape.embeddings, shape.out, shape.dim)


class InstanceGate(nn.Module):
    """x_BMD -> x_BMD."""

    def __init__(self, width: int, hidden: int, *, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Sequential(Linear(width, hidden, relu=True, dropout=dropout), Linear(hidden, width))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Each value times its gate."""
        gate: Tensor = 2.0 * self.gate(x_BMD.detach().flatten(1)).sigmoid()
        return x_BMD * gate.view_as(x_BMD)
