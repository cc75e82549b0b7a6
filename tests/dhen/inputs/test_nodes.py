"""Interpolated buckets: the embedding of a number between two nodes lies between theirs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig, LayerConfig
from dhen.inputs.features import FeatureProcessing, MixedTables
from dhen.inputs.lift import crossed, held_schema, node_tables, num_embeddings, table_dims
from dhen.schema import FeatureSchema, Table
from trials.data.vocabulary import Buckets

NODES = (10.0, 12.0, 20.0, 21.0, 40.0)
"""Beginnings of all buckets but the first: nodes 1 to 5."""
BUCKETS = {"a__bucket": Buckets(begins=NODES), "b__bucket": Buckets(begins=NODES[:4])}
SCHEMA = FeatureSchema(
    tables=(
        Table(name="site", rows=64),
        *(Table(name=name, rows=2 + len(each), buckets=True) for name, each in BUCKETS.items()),
        Table(name="bag", rows=4, multi_hot=True),
    ),
    numeric=("a", "b"),
)


def config(exponent: float = 0.0) -> DhenConfig:
    layers = (LayerConfig(modules=("linear",)),)  # type: ignore[arg-type]
    return DhenConfig(embedding_dim=8, table_dim_exponent=exponent, layers=layers, buckets="interpolated")


def batch_of(values: list[float]) -> FeatureBatch:
    numbers = np.array(values)
    ids = [torch.from_numpy(each.ids(numbers)) for each in BUCKETS.values()]
    shares = [torch.from_numpy(each.odd_shares(numbers, lambda x: x)) for each in BUCKETS.values()]
    bag = (torch.zeros(len(values), dtype=torch.int32), torch.arange(len(values)))
    return FeatureBatch(
        ids_BT=torch.stack([torch.full_like(ids[0], 63), *ids], dim=1),
        bags=(bag,),
        numeric_BK=torch.zeros(len(values), 2),
        share_BN=torch.stack(shares, dim=1),
    )


def of_both(features: FeatureProcessing, values: list[float]) -> Tensor:
    """The embeddings of both numbers."""
    found: Tensor = features(batch_of(values), torch.float32)
    assert found.shape == (len(values), 5, 8)
    return found[:, 1:3].detach()


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_between_nodes_it_is_a_mean_of_both(exponent: float) -> None:
    features = FeatureProcessing(config(exponent), SCHEMA)
    assert isinstance(features.tables, MixedTables) == (exponent > 0)
    at = dict(zip(NODES, of_both(features, list(NODES)), strict=True))
    assert len({str(e.tolist()) for e in at.values()}) == len(NODES)
    for one, other in pairwise(NODES):
        here = 1 if other == NODES[-1] else 2  # b has no node at 40
        for share in (0.25, 0.5, 0.99):
            found = of_both(features, [one + share * (other - one)])[0, :here]
            mean = (1 - share) * at[one] + share * at[other]
            torch.testing.assert_close(found, mean[:here], atol=1e-6, rtol=0)


def test_ends_and_missing_values() -> None:
    features = FeatureProcessing(config(), SCHEMA)
    below, least, high, highest, missing = of_both(features, [9.0, -1e9, 40.0, 1e9, float("nan")])
    assert torch.equal(below, least)
    assert torch.equal(high, highest)
    for other in (below, high):
        assert not torch.isclose(missing, other).any()


def test_every_bucket_has_its_rows_and_no_others_are_read() -> None:
    """Also of tables of which the last node is even, and odd."""
    held = held_schema(config(), SCHEMA)
    assert [table.rows for table in held.tables] == [64, 5, 4, 4, 4, 4]  # 8 and 7 rows of ids, halved
    assert held_schema(config(), held) == held
    assert node_tables(held) == 2
    tables = FeatureProcessing(config(), SCHEMA).tables
    rows = tables.ids(batch_of([9.0, 10.0, 12.0, 20.0, 21.0, 40.0, float("nan")]).ids_BT)  # type: ignore[union-attr]
    assert rows[:, 0].tolist() == [63] * 7
    assert list(zip(*rows[:, [1, 3]].T.tolist(), strict=True)) == [
        *[(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3)],
        (0, 0),
    ]


def test_gradients_go_to_both_nodes_in_their_shares() -> None:
    features = FeatureProcessing(config(), SCHEMA)
    features(batch_of([10.5]), torch.float32)[:, 1].sum().backward()
    gradient = features.tables.weight.grad.to_dense()  # type: ignore[union-attr, operator]
    even, odd = 64 + 2, 64 + 5 + 4 + 1  # node 2 of a, and node 1
    assert gradient[even].tolist() == pytest.approx([0.25] * 8)
    assert gradient[odd].tolist() == pytest.approx([0.75] * 8)
    assert gradient.sum().item() == pytest.approx(8.0)


def test_interactions_see_one_embedding_per_number() -> None:
    assert num_embeddings(config(), SCHEMA) == 5
    assert table_dims(config(1.0), SCHEMA) == (4, 8, 8, 8, 8, 8)
    assert [(group.dim, len(group.places)) for group in crossed(config(1.0), SCHEMA)] == [
        (8, 2),
        (8, 1),
        (4, 1),
    ]
