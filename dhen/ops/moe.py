"""A mixture-of-experts MLP: softmax-gated sum of expert MLPs, all of them computed.

The DHEN paper (section 4.3, table 3) scales AdvancedDLRM with MoE as the rival way to spend FLOPs.
Dense gating as in MMoE (Ma et al., KDD 2018) with one gate, so FLOPs grow with the experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dhen.cost import SOFTMAX_FLOPS, Costs, elementwise_cost, linear_cost, within
from dhen.memory.tape import Tape
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import mlp, mlp_cost, mlp_tape


class MoeMlp(nn.Module):
    """(B, n_in) -> (B, widths[-1])."""

    def __init__(self, n_in: int, widths: Sequence[int], experts: int, *, dropout: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(n_in, widths, dropout=dropout) for _ in range(experts))
        self.gate = Linear(n_in, experts)

    def forward(self, x: Tensor) -> Tensor:
        """sum_e softmax(gate(x))_e expert_e(x)."""
        weights_BE = self.gate(x).softmax(dim=1)
        total = weights_BE[:, :1] * self.experts[0](x)
        for index, expert in enumerate(self.experts[1:], start=1):
            total = total + weights_BE[:, index : index + 1] * expert(x)
        return total  # type: ignore[no-any-return]


def moe_cost(n_in: int, widths: Sequence[int], experts: int) -> Costs:
    """The cost of `MoeMlp`."""
    each = [row for e in range(experts) for row in within(f"expert{e}", mlp_cost("mlp", n_in, widths))]
    return (
        linear_cost("gate", n_in, experts),
        elementwise_cost("gate.softmax", experts, flops_each=SOFTMAX_FLOPS),
        *each,
        elementwise_cost("mixture", widths[-1], flops_each=2 * experts - 1),
    )


def moe_tape(tape: Tape, x: int, n_in: int, widths: Sequence[int], experts: int, *, dropout: float) -> int:
    """The memory of `MoeMlp`."""
    width, total = widths[-1], None
    gate = tape.operation(experts, [linear_tape(tape, x, n_in, experts)], saves_output=True)
    for _ in range(experts):
        expert = mlp_tape(tape, x, n_in, widths, dropout=dropout)
        weighted = tape.operation(
            width, [gate, expert], saves=[gate, expert], backward_running=tape.held(width)
        )
        total = weighted if total is None else tape.add(total, weighted)
    assert total is not None
    return total
