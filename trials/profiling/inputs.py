"""Generated inputs: features of several kinds, and batches of them with some ids far more frequent than others."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig, LayerConfig
from dhen.schema import FeatureSchema, Table
from trials.data.loader import Batch

MEAN_IDS = 3
"""Ids of an example in a multi-hot table."""
SKEW = 3
"""Exponent that makes small ids frequent: of uniform numbers' powers half are below an eighth."""
LARGEST_TABLE, SMALLEST_TABLE = 10**4.5, 10.0
BUCKETS = 200


class Inputs(NamedTuple):
    """What features a log has, and how a model turns them into embeddings."""

    tables: int
    buckets: int
    bags: int
    numeric: int
    dim: int
    exponent: float = 0.0
    """`table_dim_exponent` of the model."""
    way: Literal["summed", "apart", "interpolated"] = "summed"
    """`buckets` of the model."""

    def schema(self) -> FeatureSchema:
        """Returns tables from small to large, spread evenly on a logarithmic scale."""
        rows = np.geomspace(SMALLEST_TABLE, LARGEST_TABLE, self.tables + self.bags).astype(int).tolist()
        tables = [Table(name=f"c{place}", rows=each) for place, each in enumerate(rows[self.bags :])]
        tables += [
            Table(name=f"n{place}_bucket", rows=BUCKETS, buckets=True) for place in range(self.buckets)
        ]
        tables += [
            Table(name=f"m{place}", rows=each, multi_hot=True, mean_ids=MEAN_IDS)
            for place, each in enumerate(rows[: self.bags])
        ]
        return FeatureSchema(tables=tuple(tables), numeric=tuple(f"n{k}" for k in range(self.numeric)))

    def model(self, layers: tuple[LayerConfig, ...]) -> DhenConfig:
        """Returns a model with these layers."""
        return DhenConfig(
            embedding_dim=self.dim,
            table_dim_exponent=self.exponent,
            buckets=self.way,
            layers=layers,
        )


def feature_batch(schema: FeatureSchema, examples: int) -> FeatureBatch:
    """Returns ids of which the small ones are frequent, and normal numbers."""
    skewed = torch.rand(examples, len(schema.categorical)) ** SKEW
    rows = torch.tensor([table.rows for table in schema.categorical])
    bags = tuple(
        (
            (torch.rand(MEAN_IDS * examples) ** SKEW * table.rows).int(),
            torch.arange(0, MEAN_IDS * examples, MEAN_IDS),
        )
        for table in schema.multi_hot
    )
    return FeatureBatch(
        ids_BT=(skewed * rows).int(),
        bags=bags,
        numeric_BK=torch.randn(examples, len(schema.numeric)),
        share_BN=torch.rand(examples, len(schema.bucketed)) if schema.bucketed else None,
    )


def labelled_batch(schema: FeatureSchema, examples: int) -> Batch:
    """Returns a batch a quarter of whose examples are clicks."""
    labels = (torch.rand(examples) < 0.25).float()
    return Batch(features=feature_batch(schema, examples), label_B=labels, weight_B=None)
