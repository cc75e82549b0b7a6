"""Tables that a model holds: a share of what growing ones may grow to, beside nodes in place of buckets."""

from __future__ import annotations

import pytest

from dhen.config import DhenConfig, LayerConfig
from dhen.inputs.lift import held_schema
from dhen.model import build_model, model_cost
from dhen.schema import FeatureSchema, Growing, Table

RULE = Growing(capacity=100, evict="lru", ttl=5)
SCHEMA = FeatureSchema(
    tables=(
        Table(name="user", rows=101, growing=RULE),
        Table(name="site", rows=7),
        Table(name="price__bucket", rows=6, buckets=True),
        Table(name="tags", rows=101, growing=RULE, multi_hot=True, mean_ids=2.5),
    ),
    numeric=("price",),
)


def config(share: float, buckets: str = "summed") -> DhenConfig:
    layers = (LayerConfig(modules=("linear",)),)  # type: ignore[arg-type]
    return DhenConfig(embedding_dim=4, layers=layers, capacity_share=share, buckets=buckets)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "capacity"), [(0.25, 25), (0.004, 1), (1.0, 100)])
@pytest.mark.parametrize("buckets", ["summed", "interpolated"])
def test_growing_tables_have_their_share_once(share: float, capacity: int, buckets: str) -> None:
    this = config(share, buckets)
    held = held_schema(this, SCHEMA)
    assert held_schema(this, held) == held
    by_name = {table.name: table for table in held.tables}
    assert by_name["user"].growing == RULE.replace(capacity=capacity)
    assert (by_name["user"].rows, by_name["tags"].rows) == (capacity + 1, capacity + 1)
    assert (by_name["tags"].multi_hot, by_name["tags"].mean_ids) == (True, 2.5)
    assert by_name["site"] == SCHEMA.tables[1]
    assert ("price__bucket_even" in by_name) == (buckets == "interpolated")


def test_the_model_and_its_cost_have_it() -> None:
    model = build_model(config(0.25), SCHEMA)
    assert len(model.state_dict()["features.growing.keys"]) == 1 + 25 + 25
    assert len(model.state_dict()["features.tables.weight"]) == 26 + 7 + 6 + 26
    parameters = {
        share: sum(row.parameters for row in model_cost(config(share), SCHEMA)) for share in (1.0, 0.25)
    }
    assert parameters[1.0] - parameters[0.25] == 2 * 75 * 4
