"""AdvancedDLRM's interaction: pairwise dot products beside the flattened embeddings.

The DHEN paper names AdvancedDLRM (section 3.2.1) and leaves it open. Ours, as a function of x_BMD:
all dot products <x_i, x_j>, i < j, of the embeddings or of a learned lower-rank mix of them (rank R
mixes each of length D), concatenated with the flattened embeddings. An MLP follows, in
`dhen/blocks/dlrm.py` as an interaction module and in `dhen/baselines.py` as a model of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dhen.cost import Costs, product_cost
from dhen.parts import EmbeddingProjection, projection_cost


class PairwiseDots(nn.Module):
    """x_BMD -> (B, R(R-1)/2 + M D), with R = M where rank is 0."""

    pairs: Tensor

    def __init__(self, embeddings: int, rank: int) -> None:
        super().__init__()
        self.mix = EmbeddingProjection(embeddings, rank) if rank else nn.Identity()
        n = rank or embeddings
        row, column = torch.triu_indices(n, n, offset=1)
        self.register_buffer("pairs", row * n + column, persistent=False)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Dot products first, then the embeddings."""
        z_BRD = self.mix(x_BMD)
        dots_BP = torch.bmm(z_BRD, z_BRD.mT).flatten(1).index_select(1, self.pairs)
        return torch.cat((dots_BP, x_BMD.flatten(1)), dim=1)


def pairwise_width(embeddings: int, dim: int, rank: int) -> int:
    """Length of the output of `PairwiseDots`."""
    n = rank or embeddings
    return n * (n - 1) // 2 + embeddings * dim


def pairwise_cost(embeddings: int, dim: int, rank: int) -> Costs:
    """The cost of `PairwiseDots`; the product is counted in full, as it is computed."""
    n = rank or embeddings
    mix = (projection_cost("mix", embeddings, rank, dim),) if rank else ()
    return (*mix, product_cost("dots", n, dim, n))
