"""What updates of tables on several ranks are priced at, beside what a backward pass holds."""

from __future__ import annotations

import pytest
import torch

from dhen.batch import FeatureBatch
from dhen.inputs.features import EmbeddingTables
from dhen.schema import FeatureSchema, Table
from trials.planner.memory_counter import MemoryCounter
from trials.planner.table_memory import Lookup, update_bytes
from trials.planner.table_placement import Placement

RANKS = 2


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
    nothing = (0.0,) * RANKS
    placement = Placement(("c", "m"), (), (0,) * RANKS, nothing, nothing, nothing, nothing, 0)
    planned = update_bytes(Lookup(schema.tables, (dim,) * 2, placement, RANKS, examples, 4, 0, False))
    assert planned == pytest.approx(counter.peak, rel=0.01)
