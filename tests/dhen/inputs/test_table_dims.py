"""Lengths of embeddings by the power law; lifted embeddings stand in the schema's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig, LayerConfig
from dhen.inputs.features import FeatureProcessing, MixedTables, matrices
from dhen.inputs.lift import SHORTEST, Lift, table_dims
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table

LAYERS = (LayerConfig(modules=("linear",)),)  # type: ignore[arg-type]
SCHEMA = FeatureSchema(
    tables=(
        Table(name="large", rows=1024),
        Table(name="smallest", rows=4),
        Table(name="middle", rows=64),
        Table(name="small bag", rows=5, multi_hot=True),
        Table(name="large bag", rows=900, multi_hot=True),
    ),
    numeric=("x",),
)


def config(exponent: float, dim: int = 16) -> DhenConfig:
    return DhenConfig(embedding_dim=dim, table_dim_exponent=exponent, layers=LAYERS)


@pytest.mark.parametrize(
    ("exponent", "dim", "expected"),
    [
        (0.0, 16, (16, 16, 16, 16, 16)),
        (0.25, 16, (4, 16, 8, 16, 4)),  # 256 ** -0.25 = 1 / 4, 16 ** -0.25 = 1 / 2
        (0.5, 64, (4, 64, 16, 64, 4)),
        (0.25, 24, (4, 24, 8, 24, 4)),  # half of 24, and the power of two below
        (1.0, 2, (2, 2, 2, 2, 2)),
    ],
)
def test_the_power_law(exponent: float, dim: int, expected: tuple[int, ...]) -> None:
    assert table_dims(config(exponent, dim), SCHEMA) == expected


@settings(max_examples=30)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20), st.floats(0, 1), st.integers(1, 512))
def test_larger_tables_are_never_longer(rows: list[int], exponent: float, dim: int) -> None:
    tables = tuple(Table(name=str(place), rows=n) for place, n in enumerate(sorted(rows)))
    found = table_dims(config(exponent, dim), FeatureSchema(tables=tables))
    assert found[0] == dim
    assert list(found) == sorted(found, reverse=True)
    assert all(each == dim or (each & (each - 1) == 0 and each >= SHORTEST) for each in found)


def test_plain_data_is_as_before_where_all_are_alike() -> None:
    assert "table_dim_exponent" not in config(0.0).to_dict()
    assert parse_model(config(0.5).to_dict(), "test") == config(0.5)
    alike = FeatureSchema(tables=(Table(name="a", rows=50), Table(name="b", rows=50)))
    names = [name for name, _ in build_model(config(0.5), alike).named_parameters()]
    assert [name for name in names if name.startswith("features.")] == ["features.tables.weight"]


def test_lifted_embeddings_stand_in_the_schemas_order() -> None:
    """Every row of a table holds its place; a lift of ones over d leaves what it lifts."""
    features = FeatureProcessing(config(0.25), SCHEMA)
    assert isinstance(features.tables, MixedTables)
    assert list(matrices(features.tables)) == ["d16.weight", "d8.weight", "d4.weight"]
    with torch.no_grad():
        for each in matrices(features.tables).values():
            places = [SCHEMA.tables.index(table) for table in each.tables for _ in range(table.rows)]
            each.weight.copy_(torch.tensor(places, dtype=torch.float32).unsqueeze(1))
        for lift in features.modules():
            if isinstance(lift, Lift):
                lift.weight.fill_(1 / lift.weight.shape[1])
    ids_BT = torch.tensor([[1023, 3, 63], [0, 0, 0]], dtype=torch.int32)
    bags = tuple((torch.tensor([0, last, last]), torch.tensor([0, 2])) for last in (4, 899))
    batch = FeatureBatch(ids_BT=ids_BT, bags=bags, numeric_BK=torch.zeros(2, 1))
    x_BMD = features(batch, torch.float32)
    assert x_BMD.shape == (2, 6, 16)
    assert torch.equal(x_BMD[:, :5], torch.arange(5.0).view(1, 5, 1).expand(2, 5, 16))
