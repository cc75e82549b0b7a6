"""AdvancedDLRM's interaction: pairwise dot products beside the flattened embeddings.

The DHEN paper names AdvancedDLRM (section 3.2.1) and leaves it open. Ours, as a function of x_BMD:
all dot products <x_i, x_j>, i < j, of the embeddings or of a learned lower-rank mix of them (rank R
mixes each of length D), concatenated with the flattened embeddings. An MLP follows, in
`dhen/blocks/dlrm.py` as an interaction module and in `dhen/advanced_dlrm.py` as a model of its own.

Shapes: B examples, M embeddings, D their dimension, R embeddings or mixes of them, P pairs of those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.cost import MATMUL, CostRow, Costs, product_cost
from dhen.ops.linear import linear
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.tape import Tape

INDEX_BYTES = 8


class PairwiseDots(nn.Module):
    """x_BMD -> (B, R(R-1)/2 + M D), with R = M if rank is 0."""

    pairs: Tensor
    places: Tensor

    def __init__(self, embeddings: int, rank: int) -> None:
        super().__init__()
        self.mix = EmbeddingProjection(embeddings, rank) if rank else nn.Identity()
        n = rank or embeddings
        row, column = torch.triu_indices(n, n, offset=1)
        places = torch.full((n, n), len(row))
        places[row, column] = places[column, row] = torch.arange(len(row))
        self.register_buffer("pairs", row * n + column, persistent=False)
        self.register_buffer("places", places.flatten(), persistent=False)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Dot products first, then the embeddings."""
        dots_BP = _Dots.apply(self.mix(x_BMD), self.pairs, self.places)  # type: ignore[no-untyped-call]
        return torch.cat((dots_BP, x_BMD.flatten(1)), dim=1)


class _Dots(torch.autograd.Function):
    """<z_i, z_j> for i < j: the P elements of z z^T above its diagonal, at `pairs` of the flattened matrix.

    The backward pass fills a symmetric matrix S from the gradients, zero on its diagonal, by `places` (where
    each of its elements is among the pairs, P on the diagonal); the gradient is the one product S z.
    """

    @staticmethod
    def forward(ctx: Any, z_BRD: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(z_BRD, places)
        products = torch.bmm(z_BRD, z_BRD.mT).flatten(1)
        return products.gather(1, pairs.expand(products.shape[0], -1))

    @staticmethod
    def backward(ctx: Any, gradient_BP: Tensor) -> tuple[Tensor, None, None]:
        z_BRD, places = ctx.saved_tensors
        batch, n, _ = z_BRD.shape
        padded = F.pad(gradient_BP, (0, 1))
        symmetric = padded.gather(1, places.expand(batch, -1)).view(batch, n, n)
        return torch.bmm(symmetric, z_BRD), None, None


def pairwise_width(embeddings: int, dim: int, rank: int) -> int:
    """Length of the output of `PairwiseDots`."""
    n = rank or embeddings
    return n * (n - 1) // 2 + embeddings * dim


def pairwise_cost(embeddings: int, dim: int, rank: int) -> Costs:
    """The cost of `PairwiseDots`; the product is counted in full, as it is computed."""
    n = rank or embeddings
    mix = (projection_cost("mix", embeddings, rank, dim),) if rank else ()
    return (*mix, product_cost("dots", n, dim, n))


def pairwise_tape(tape: Tape, x: int, embeddings: int, dim: int, rank: int) -> int:
    """The memory of `PairwiseDots`."""
    n = rank or embeddings
    pairs = n * (n - 1) // 2
    tape.buffer_bytes += INDEX_BYTES * (pairs + n * n)
    z = projection_tape(tape, x, embeddings, rank, dim) if rank else x
    dots = tape.operation(
        pairs,
        [z],
        saves=[z],
        running=tape.held(n * n),
        backward_running=tape.held(n * n + pairs + 1),
    )
    return tape.concat([dots, x])


# Learned sums over all pairs of two sets of embeddings: u_h = sum_ij W_hij (x_i * y_j), products by element.
#
# Embeddings lie in the last dimension, so that the sum over j is one matmul for all examples and that over i a
# batched one. With the products themselves in memory, or gathered for i < j, forward and backward took 4 to 6
# times as long (batch 1,024, 32 embeddings of 16 to 8, one thread of a Xeon with AMX, torch 2.13, 2026-11-21).
#
# Shapes: B examples, D dimension of embeddings, I embeddings of the first set, J of the second, H sums.


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
    """The memory of `pair_mix`; `weight` if W is no parameter itself."""
    i, j = tape.values(x) // dim, tape.values(y) // dim
    given = [] if weight is None else [weight]
    shapes = [(out, i * j)] if weight is None else []
    inner = tape.operation(dim * out * i, [*given, y], saves=[y, *given], parameters=shapes)
    # one operation in forward; in backward its gradient, with the embeddings in the middle, is copied first
    product = tape.operation(dim * out, [inner, x], saves=[inner, x], view=True)
    mixed = tape.operation(dim * out, [product])
    tape.refer(inner)
    return mixed
