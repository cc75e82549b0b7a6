"""Every model family and every shipped configuration: logits, costs that torch agrees with, round trips."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import LOOKUP, dense_parameters, embedding_parameters, headline_flops
from dhen.inputs.features import EmbeddingTables
from dhen.model import build_model, catalog, model_cost, named_model, parse_model
from dhen.schema import FeatureSchema, Table

BATCH = 4
FULL = FeatureSchema(
    tables=(
        Table(name="a", rows=10),
        Table(name="b", rows=7),
        Table(name="m", rows=9, multi_hot=True, mean_ids=1.5),
    ),
    numeric=("x", "y"),
)
BUCKETS = FULL.replace(
    tables=(*FULL.tables[:2], Table(name="x__bucket", rows=66, buckets=True), FULL.tables[2])
)
ONLY_NUMERIC = FeatureSchema(numeric=("x", "y"))
ONLY_TABLES = FeatureSchema(tables=(Table(name="a", rows=10), Table(name="b", rows=7)))
SCHEMAS = (FULL, BUCKETS, ONLY_NUMERIC, ONLY_TABLES)

SHARED = {
    "members": {"layers": [{"modules": ["linear"], "raw_numeric": True}, {"modules": ["mlp"]}], "members": 3},
    "members from the second layer": {
        "layers": [{"modules": ["dlrm", "fm"]}] * 2,
        "members": 2,
        "members_from": 1,
    },
    "interpolated buckets": {"layers": [{"modules": ["dlrm"]}], "buckets": "interpolated"},
    "several heads": {"layers": [{"modules": ["linear"]}], "members": 4, "members_from": 1, "head": [8, 4]},
}
EVERY = {name: named_model(name) for name in catalog()} | {
    name: parse_model(data, name) for name, data in SHARED.items()
}


def batch_for(schema: FeatureSchema) -> FeatureBatch:
    ids = [torch.randint(0, table.rows, (BATCH, 1)) for table in schema.categorical]
    bag = (torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32), torch.tensor([0, 1, 3, 3]))
    return FeatureBatch(
        ids_BT=torch.cat(ids, dim=1) if ids else torch.zeros(BATCH, 0, dtype=torch.int64),
        bags=tuple(bag for _ in schema.multi_hot),
        numeric_BK=torch.randn(BATCH, len(schema.numeric)),
        share_BN=torch.rand(BATCH, len(schema.bucketed)) if schema.bucketed else None,
    )


def mixed(schema: FeatureSchema) -> FeatureSchema:
    """With one table that is 4 times as large as it was, and one with 16 times as many rows."""
    first, second, *others = schema.tables
    larger = (
        first.replace(rows=4 * first.rows),
        second.replace(rows=16 * second.rows),
    )
    return schema.replace(tables=(*larger, *others))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_logits_and_costs(name: str) -> None:
    config = EVERY[name]
    assert parse_model(config.to_dict(), name) == config
    for schema in SCHEMAS:
        check(config, schema)
    for schema in (FULL, ONLY_TABLES):
        check(config.replace(table_dim_exponent=1.0), mixed(schema))


def check(config: ModelConfig, schema: FeatureSchema) -> None:
    model = build_model(config, schema).train()
    with FlopCounterMode(display=False) as counter:
        logit = model(batch_for(schema))
    rows = model_cost(config, schema)
    members = getattr(config, "members", 1)
    assert logit.shape == ((BATCH, members) if members > 1 else (BATCH,))
    assert model.eval()(batch_for(schema)).shape == (BATCH,)
    assert headline_flops(rows) * BATCH == counter.get_total_flops()
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert dense_parameters(rows) + embedding_parameters(rows) == counted


def test_lookup_bytes_follow_the_ids_looked_up() -> None:
    rows = model_cost(named_model("dlrm"), FULL)
    dim = named_model("dlrm").embedding_dim
    assert [row.bytes for row in rows if row.kind == LOOKUP] == [dim * 4, dim * 4, 1.5 * dim * 4]


def test_an_empty_bag_is_a_zero_embedding() -> None:
    tables = EmbeddingTables(FULL, 4)
    looked_up = tables(batch_for(FULL))
    assert looked_up[-1].shape == (BATCH, 1, 4)
    assert (looked_up[-1][2] == 0).all()  # offsets 3, 3: the third example has no ids


def test_tables_do_not_overlap() -> None:
    tables = EmbeddingTables(FULL, 1)
    with torch.no_grad():
        tables.weight.copy_(torch.arange(FULL.total_rows).unsqueeze(1))
    zeros = FeatureBatch(
        ids_BT=torch.zeros(1, 2, dtype=torch.int32),
        bags=((torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0])),),
        numeric_BK=torch.zeros(1, 2),
    )
    one_hot, bag = tables(zeros)
    assert one_hot.flatten().tolist() == [0.0, 10.0]
    assert bag.item() == 17.5
