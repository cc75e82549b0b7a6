"""The tables that a model holds of a log's: nodes in place of buckets, a share of what tables may grow to."""

from __future__ import annotations

from functools import lru_cache

from dhen.config import ModelConfig
from dhen.inputs.nodes import node_tables, with_nodes
from dhen.schema import FeatureSchema, Table


class ShareTable(Table):
    """A growing table with a share of the capacity that it has in the log's schema."""


def held_schema(config: ModelConfig, schema: FeatureSchema) -> FeatureSchema:
    """Returns a log's inputs with the tables that a model holds: where it interpolates, those of even nodes, then
    those of odd ones, have the place of the tables of buckets; growing tables have its share of their capacity."""
    if config.buckets == "interpolated" and not node_tables(schema):
        schema = with_nodes(schema)
    if config.capacity_share < 1.0 and not any(isinstance(table, ShareTable) for table in schema.tables):
        schema = _with_capacity(schema, config.capacity_share)
    return schema


@lru_cache(maxsize=8)
def _with_capacity(schema: FeatureSchema, share: float) -> FeatureSchema:
    return schema.replace(tables=tuple(_shared(table, share) for table in schema.tables))


def _shared(table: Table, share: float) -> Table:
    if table.growing is None:
        return table
    capacity = max(1, round(share * table.growing.capacity))
    kept = {name: getattr(table, name) for name in Table.model_fields}
    kept |= {"rows": capacity + 1, "growing": table.growing.replace(capacity=capacity)}
    return ShareTable(**kept)
