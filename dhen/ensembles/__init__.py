"""Ensembles by name: how a layer joins the outputs of its interaction modules (DHEN paper, equation 1).

Adding one is a class in a file here and an entry below.
"""

from __future__ import annotations

from dhen.ensembles.ensembles import (
    AttentionSumConfig,
    BilinearSumConfig,
    ConcatConfig,
    EnsembleConfig,
    GatedSumConfig,
    SumConfig,
    WeightedSumConfig,
)

ENSEMBLES: dict[str, type[EnsembleConfig]] = {
    "attention": AttentionSumConfig,
    "bilinear": BilinearSumConfig,
    "concat": ConcatConfig,
    "gated": GatedSumConfig,
    "sum": SumConfig,
    "weighted_sum": WeightedSumConfig,
}
