"""The small parts that several modules share: an MLP, the projection over embeddings, the map W_m.

Each part is a torch module with a function for its cost beside it.

Shapes: B examples, M embeddings, D their dimension, L embeddings out, V numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.cost import CostRow, Costs, elementwise_cost, linear_cost
from dhen.memory.tape import Tape
from dhen.ops.linear import Linear, linear_tape

Widths = tuple[Annotated[int, Field(gt=0, le=65_536)], ...]
"""Output widths of the layers of an MLP, first to last."""


def mlp(n_in: int, widths: Sequence[int], *, dropout: float) -> nn.Sequential:
    """Linear, ReLU, dropout for each width: (B, n_in) -> (B, widths[-1]); empty widths are the identity."""
    return nn.Sequential(*(Linear(a, b, relu=True, dropout=dropout) for a, b in pairwise((n_in, *widths))))


def mlp_cost(name: str, n_in: int, widths: Sequence[int]) -> Costs:
    """The cost of `mlp`."""
    rows: list[CostRow] = []
    for index, (a, b) in enumerate(pairwise((n_in, *widths))):
        rows.append(linear_cost(f"{name}{index}", a, b))
        rows.append(elementwise_cost(f"{name}{index}.relu", b))
    return tuple(rows)


def mlp_tape(
    tape: Tape, x: int, n_in: int, widths: Sequence[int], *, dropout: float, x_needs_gradient: bool = True
) -> int:
    """The memory of `mlp`."""
    for a, b in pairwise((n_in, *widths)):
        x = linear_tape(tape, x, a, b, relu=True, p=dropout, x_needs_gradient=x_needs_gradient)
        x_needs_gradient = True
    return x


class EmbeddingProjection(nn.Module):
    """A linear map over embeddings, W in R^(m x l): x_BMD -> u_BLD (paper, equations 2 and 4)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=False)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """u_BLD, each a mix of the M embeddings."""
        return mix_embeddings(self.linear.weight, x_BMD)


def mix_embeddings(weight_LM: Tensor, x_BMD: Tensor) -> Tensor:
    """W x_b for each example b: u_BLD. As a batched product nothing is transposed in memory."""
    return torch.bmm(weight_LM.expand(x_BMD.shape[0], *weight_LM.shape), x_BMD)


def projection_cost(name: str, n_in: int, n_out: int, dim: int) -> CostRow:
    """The cost of `EmbeddingProjection` for embeddings of length `dim`."""
    return linear_cost(name, n_in, n_out, positions=dim, bias=False)


def projection_tape(tape: Tape, x: int, n_in: int, n_out: int, dim: int) -> int:
    """The memory of `mix_embeddings`: its backward has a gradient of the weight for each example, then sums."""
    weight = tape.operation(n_in * n_out, [], parameters=[(n_out, n_in)], view=True)
    return tape.operation(n_out * dim, [weight, x], saves=[x])


class VectorToEmbeddings(nn.Module):
    """W_m: a single vector of length v becomes l embeddings of length d: (B, v) -> u_BLD = reshape(W_m v + bias).

    The paper's W_m has no bias; modules that end in an MLP keep the one that an MLP's layer has.
    """

    def __init__(self, n_in: int, embeddings: int, dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.shape = (embeddings, dim)
        self.linear = Linear(n_in, embeddings * dim, bias=bias)

    def forward(self, v_BV: Tensor) -> Tensor:
        """u_BLD."""
        u_BLD: Tensor = self.linear(v_BV).unflatten(1, self.shape)
        return u_BLD


def vector_to_embeddings_cost(
    name: str, n_in: int, embeddings: int, dim: int, *, bias: bool = True
) -> CostRow:
    """The cost of `VectorToEmbeddings`."""
    return linear_cost(name, n_in, embeddings * dim, bias=bias)


def vector_to_embeddings_tape(
    tape: Tape, v: int, n_in: int, embeddings: int, dim: int, *, bias: bool = True
) -> int:
    """The memory of `VectorToEmbeddings`."""
    return linear_tape(tape, v, n_in, embeddings * dim, bias=bias)
