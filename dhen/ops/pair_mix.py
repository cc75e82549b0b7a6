"""Learned sums over all pairs of two sets of embeddings: u_h = sum_ij W_hij (x_i * y_j), products by element.

Embeddings lie in the last dimension, so that the sum over j is one matmul for all examples and that over i a
batched one. With the products themselves in memory, or gathered for i < j, forward and backward took 4 to 6
times as long (batch 1,024, 32 embeddings of 16 to 8, one thread of a Xeon with AMX, torch 2.13, 2026-11-21).

Shapes: B examples, D dimension of embeddings, I embeddings of the first set, J of the second, H sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dhen.cost import MATMUL, CostRow, Costs, product_cost
from dhen.memory.tape import Tape
from dhen.ops.linear import linear


def pair_mix(x_BDI: Tensor, y_BDJ: Tensor, weight_HIJ: Tensor) -> Tensor:
    """u_BDH."""
    batch, dim, i = x_BDI.shape
    inner = linear(y_BDJ, weight_HIJ.flatten(0, 1), None)
    mixed = torch.bmm(inner.view(batch * dim, -1, i), x_BDI.reshape(batch * dim, i, 1))
    return mixed.view(batch, dim, -1)


def pair_mix_cost(name: str, out: int, dim: int, i: int, j: int, *, parameters: int) -> Costs:
    """The cost of `pair_mix`, with W computed in full whatever its parameters."""
    inner = CostRow(name=f"{name}.inner", kind=MATMUL, flops=2.0 * dim * out * i * j, parameters=parameters)
    return (inner, product_cost(f"{name}.outer", dim, i, out))


def pair_mix_tape(tape: Tape, x: int, y: int, out: int, dim: int, *, weight: int | None = None) -> int:
    """The memory of `pair_mix`; `weight` where W is no parameter itself."""
    i, j = tape.values(x) // dim, tape.values(y) // dim
    given = [] if weight is None else [weight]
    shapes = [(out, i * j)] if weight is None else []
    inner = tape.operation(dim * out * i, [*given, y], saves=[y, *given], parameters=shapes)
    # one operation in forward; in backward its gradient, with the embeddings in the middle, is copied first
    product = tape.operation(dim * out, [inner, x], saves=[inner, x], view=True)
    mixed = tape.operation(dim * out, [product])
    tape.refer(inner)
    return mixed
