"""Ensembles by name: how a layer joins the outputs of its interaction modules (DHEN paper, equation 1).

Adding one is a class in a file here and an entry below.
"""

from __future__ import annotations

from dhen.ensembles.base import EnsembleConfig
from dhen.ensembles.mixing import AttentionSumConfig, BilinearSumConfig, GatedSumConfig
from dhen.ensembles.paper import ConcatConfig, SumConfig, WeightedSumConfig

ENSEMBLES: dict[str, type[EnsembleConfig]] = {
    "attention": AttentionSumConfig,
    "bilinear": BilinearSumConfig,
    "concat": ConcatConfig,
    "gated": GatedSumConfig,
    "sum": SumConfig,
    "weighted_sum": WeightedSumConfig,
}
