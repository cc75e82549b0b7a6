"""What lookups and updates of tables on several ranks are priced at, on cases small enough to add up by hand."""

from __future__ import annotations

import pytest
import torch

from dhen.batch import FeatureBatch
from dhen.inputs.features import EmbeddingTables
from dhen.schema import FeatureSchema, Table
from trials.planner.memory_counter import MemoryCounter
from trials.planner.table_memory import Lookup, update_bytes
from trials.planner.table_placement import Placement, TableShard

SHARDED, BAG, SMALL = (
    Table(name="a", rows=1000),
    Table(name="b", rows=1000, multi_hot=True, mean_ids=3),
    Table(name="s", rows=10),
)
EXAMPLES, RANKS, DIM = 8, 2, 4
BATCH = EXAMPLES * RANKS


def lookup(*, sent_bytes: int = 4, repeats_rows: bool = False) -> Lookup:
    """One table on each rank, and one on both."""
    columns = BATCH * DIM * sent_bytes
    placement = Placement(
        replicated=("s",),
        shards=(TableShard("a", 0, 0, DIM), TableShard("b", 1, 0, DIM)),
        bytes_per_rank=(0, 0),
        cost_per_rank=(0.0, 0.0),
        lookup_bytes_per_rank=(0.0, 0.0),
        all_to_all_bytes_per_rank=(float(columns), float(columns)),
        id_bytes_per_rank=(8.0 * BATCH, 8.0 * 3 * BATCH),
        replicated_gradient_bytes=4 * 10 * DIM,
    )
    return Lookup((SHARDED, BAG, SMALL), (DIM,) * 3, placement, RANKS, EXAMPLES, sent_bytes, 0, repeats_rows)


def test_tables_that_all_ranks_have_join_gradients_of_both_kinds_as_backward_does() -> None:
    """Against what one backward pass holds: gradients of embeddings, a sparse one of each kind, a copy of both."""
    examples, dim = 64, 16
    schema = FeatureSchema(
        tables=(Table(name="c", rows=9), Table(name="m", rows=9, multi_hot=True, mean_ids=3)), numeric=()
    )
    tables = EmbeddingTables(schema, dim)
    offsets = torch.arange(0, 3 * examples, 3)
    bags = ((torch.zeros(3 * examples, dtype=torch.int64), offsets),)
    ids = torch.zeros(examples, 1, dtype=torch.int64)
    found = tables(FeatureBatch(ids_BT=ids, bags=bags, numeric_BK=torch.zeros(examples, 0)))
    ones = [torch.ones_like(e) for e in found]
    with MemoryCounter() as counter:
        torch.autograd.backward(found, ones)
    placement = lookup().placement._replace(replicated=("c", "m"), shards=(), replicated_gradient_bytes=0)
    placement = placement._replace(all_to_all_bytes_per_rank=(0.0,) * RANKS, id_bytes_per_rank=(0.0,) * RANKS)
    planned = update_bytes(Lookup(schema.tables, (dim,) * 2, placement, RANKS, examples, 4, 0, False))
    assert planned == pytest.approx(counter.peak, rel=0.01)
