"""Small tables that every rank holds whole: looked up without a transfer, kept equal by averaging gradients.

The gradient is dense, one number for each weight, so that one all-reduce is all there is. The update is
row-wise Adagrad's of `trials.optim.rowwise_adagrad`: a row that no rank looked up has no gradient and stays.
Tables in fp16 are rounded with the same random bits on all ranks.

Shapes: B examples, T categorical tables, N ids looked up, R rows of a matrix, D dimension of embeddings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.inputs.features import EmbeddingTables
from dhen.schema import FeatureSchema
from trials.embeddings.blocks import Block, HeldBlock
from trials.embeddings.fp16 import HalfTables
from trials.optim.rowwise_adagrad import EPSILON
from trials.optim.stochastic_rounding import StochasticRounding


class ReplicatedTables:
    """Some tables of a schema, all of one embedding length, on every rank; weights are zero until they are
    loaded."""

    def __init__(
        self,
        schema: FeatureSchema,
        names: frozenset[str],
        dim: int,
        ranks: int,
        device: torch.device,
        rounding: StochasticRounding | None,
    ) -> None:
        """`rounding` is that of fp16 tables, at the same count on all ranks; None for fp32."""
        indices = [index for index, table in enumerate(schema.tables) if table.name in names]
        self._ranks, self._rounding = ranks, rounding
        tables = _zeros(schema, dim, indices).to(device)
        self.names = tuple(table.name for table in tables.tables)
        self._tables = tables if rounding is None else HalfTables(tables)
        self._sum_R = torch.zeros(len(self._tables.weight), device=device)
        starts = [0, *itertools.accumulate(table.rows for table in tables.tables)]
        self.held = [
            HeldBlock(Block(name, 0, dim), self._tables.weight.detach()[start:stop], self._sum_R[start:stop])
            for name, (start, stop) in zip(self.names, itertools.pairwise(starts), strict=True)
        ]

    def lookup(self, features: FeatureBatch) -> dict[str, Tensor]:
        """Returns e_BD of each table, by name."""
        embeddings = self._tables(features)
        by_table = [e_BD for e_BTD in embeddings for e_BD in e_BTD.unbind(1)]
        return dict(zip(self.names, by_table, strict=True))

    @torch.no_grad()
    def update(self, rate: float, decay: float) -> None:
        """Averages all ranks' gradients and runs the optimizer; `decay` is L2 of the rows that were looked up."""
        weight_RD = self._tables.weight
        gradient = weight_RD.grad
        assert gradient is not None
        rows, values_ND = gradient._indices()[0], gradient._values()
        gradient_RD = torch.zeros_like(weight_RD, dtype=torch.float32).index_add_(0, rows, values_ND)
        weight_RD.grad = None
        dist.all_reduce(gradient_RD.div_(self._ranks))
        if decay:
            touched_R = torch.zeros_like(self._sum_R).index_fill_(0, rows, 1.0)
            dist.all_reduce(touched_R, dist.ReduceOp.MAX)
            gradient_RD.addcmul_(weight_RD.float(), touched_R.unsqueeze(1), value=decay)
        self._sum_R.add_(torch.linalg.vector_norm(gradient_RD, dim=1).square_(), alpha=1 / weight_RD.shape[1])
        scale_R = self._sum_R.sqrt().add_(EPSILON).reciprocal_().mul_(rate)
        step_RD = gradient_RD.mul_(scale_R.unsqueeze(1))
        if self._rounding is None:
            weight_RD.sub_(step_RD)
            return
        every_row = torch.arange(len(weight_RD), device=weight_RD.device)
        self._rounding.write(weight_RD, every_row, step_RD.neg_().add_(weight_RD))


def _zeros(schema: FeatureSchema, dim: int, indices: Sequence[int]) -> EmbeddingTables:
    """Returns tables of zeros without drawing random numbers, which would change the numbers that others draw."""
    with torch.random.fork_rng(devices=[]):
        tables = EmbeddingTables(schema, dim, indices)
    torch.nn.init.zeros_(tables.weight)
    return tables
