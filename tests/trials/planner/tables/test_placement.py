"""Placement of embedding tables: every column once, bytes and costs that add up, memory kept, balance."""

from __future__ import annotations

import random
from statistics import fmean as mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dhen.schema import Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.planner import table_placement
from trials.planner.table_placement import (
    NARROWEST,
    ONE_PROCESS_ROW_STATE_BYTES,
    TABLE_DECAY_ROW_BYTES,
    Placement,
    PlacementError,
    Workload,
    narrowest_width,
    place,
    rates,
    sharded_cost,
)

ZIONEX = load_cluster("zionex")
RANKS = ("1x1", "1x2", "1x3", "1x8", "2x1", "2x4", "3x2", "4x8")

some_tables = st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 100)), min_size=0, max_size=30).map(
    lambda pairs: tuple(_table(i, rows, ids) for i, (rows, ids) in enumerate(pairs))
)
dims, batches = st.integers(1, 130), st.sampled_from([1, 64, 4096, 65_536])
clusters = st.sampled_from(RANKS).map(ZIONEX.with_ranks)


def _table(number: int, rows: int, mean_ids: float = 1.0) -> Table:
    return Table(name=f"t{number}", rows=rows, multi_hot=True, mean_ids=mean_ids)


def zipf_tables(count: int, seed: int, largest: float = 1e8, most_ids: float = 200) -> tuple[Table, ...]:
    """Rows and ids per example fall with their place in two independent orders."""
    drawn = random.Random(seed)
    by_rows, by_ids = drawn.sample(range(1, count + 1), count), drawn.sample(range(1, count + 1), count)
    return tuple(
        _table(i, max(3, int(largest / by_rows[i] ** 1.2)), max(1.0, most_ids / by_ids[i]))
        for i in range(count)
    )


@given(some_tables, dims, clusters, batches)
def test_every_column_lies_on_exactly_one_rank_and_what_ranks_hold_and_send_adds_up(
    tables: tuple[Table, ...], dim: int, cluster: Cluster, batch: int
) -> None:
    found = place(tables, dim, cluster, global_batch=batch)
    sharded = {shard.table for shard in found.shards}
    assert sharded | set(found.replicated) == {table.name for table in tables}
    assert not sharded & set(found.replicated)
    for name in sharded:
        shards = [shard for shard in found.shards if shard.table == name]
        columns = [
            c for shard in shards for c in range(shard.first_column, shard.first_column + shard.columns)
        ]
        assert columns == list(range(dim))
        assert len({shard.rank for shard in shards}) == len(shards)
        assert all(shard.columns >= min(NARROWEST, dim) for shard in shards)
        assert all(0 <= shard.rank < cluster.ranks for shard in shards)
        assert sum(shard.columns % NARROWEST != 0 for shard in shards) <= 1
    by_name = {table.name: table for table in tables}
    copies = sum(by_name[name].rows * (4 * dim + 4) for name in found.replicated)
    for rank in range(cluster.ranks):
        here = [shard for shard in found.shards if shard.rank == rank]
        held = sum(by_name[shard.table].rows * (4 * shard.columns + 4) for shard in here)
        assert found.bytes_per_rank[rank] == copies + held
        assert found.all_to_all_bytes_per_rank[rank] == sum(4 * batch * shard.columns for shard in here)
        ids = sum(8 * batch * by_name[shard.table].mean_ids for shard in here)
        assert found.id_bytes_per_rank[rank] == pytest.approx(ids)
    assert found.heaviest_bytes == max(found.bytes_per_rank)
    assert max(found.cost_per_rank) >= mean(found.cost_per_rank) * (1 - 1e-9)


@given(some_tables, dims, clusters, batches, st.integers(0, 2**33))
def test_memory_is_kept_and_what_lacks_is_what_would_do(
    tables: tuple[Table, ...], dim: int, cluster: Cluster, batch: int, memory: int
) -> None:
    try:
        found = place(tables, dim, cluster, global_batch=batch, memory_bytes=memory)
    except PlacementError as error:
        memory += error.lacking_bytes
        found = place(tables, dim, cluster, global_batch=batch, memory_bytes=memory)
        with pytest.raises(PlacementError):
            place(tables, dim, cluster, global_batch=batch, memory_bytes=memory - 1)
    assert found.heaviest_bytes <= memory
    place(tables, dim, cluster, global_batch=batch, memory_bytes=memory + 1)


@pytest.mark.parametrize(("ranks", "seed"), [("2x8", 0), ("16x8", 1)])
def test_balance_of_many_zipf_tables(ranks: str, seed: int) -> None:
    cluster, dim, batch = ZIONEX.with_ranks(ranks), 128, 65_536
    tables = zipf_tables(500, seed)
    found = place(tables, dim, cluster, global_batch=batch)
    narrowest, work = narrowest_width(dim, cluster.ranks), Workload(batch, 4)
    indivisible = max(sharded_cost(t, narrowest, work, rates(cluster)).seconds for t in tables)
    assert max(found.cost_per_rank) <= 1.05 * max(mean(found.cost_per_rank), indivisible)
    unsplit = sum(sharded_cost(t, dim, work, rates(cluster)).seconds for t in tables) / cluster.ranks
    assert max(found.cost_per_rank) <= 1.05 * unsplit, (
        "splitting adds cost; balance must not be bought with it"
    )
    assert len(found.shards) < 2 * len(tables)
    assert found.heaviest_bytes <= 1.6 * sum(found.bytes_per_rank) / cluster.ranks


def test_only_what_is_out_of_balance_is_split() -> None:
    cluster = ZIONEX.with_ranks("1x8")
    alike = tuple(_table(i, 10**6) for i in range(16))
    assert [shard.columns for shard in place(alike, 64, cluster, global_batch=4096).shards] == [64] * 16
    one = place((_table(0, 10**6),), 64, cluster, global_batch=4096)
    assert [shard.columns for shard in one.shards] == [8] * 8
    assert max(one.cost_per_rank) == pytest.approx(mean(one.cost_per_rank))
    thirds = place((_table(0, 10**6),), 62, ZIONEX.with_ranks("1x3"), global_batch=4096)
    assert [shard.columns for shard in thirds.shards] == [22, 20, 20]
    too_narrow = place((_table(0, 10**6),), 7, cluster, global_batch=4096)
    assert [shard.columns for shard in too_narrow.shards] == [7]


@given(some_tables, dims, batches)
@settings(max_examples=20)
def test_twice_the_ranks_never_hold_more(tables: tuple[Table, ...], dim: int, batch: int) -> None:
    for chain in (("1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8"), ("1x3", "2x3", "4x3"), ("1x1", "3x1")):
        heaviest = [
            place(tables, dim, ZIONEX.with_ranks(ranks), global_batch=batch).heaviest_bytes for ranks in chain
        ]
        assert heaviest == sorted(heaviest, reverse=True)


def test_one_rank_holds_all_tables_and_sends_nothing() -> None:
    tables, alone = zipf_tables(20, 0, largest=1e5), ZIONEX.with_ranks("1x1")
    found = place(tables, 16, alone, global_batch=256, row_state_bytes=ONE_PROCESS_ROW_STATE_BYTES)
    assert found.shards == ()
    assert found.replicated == tuple(table.name for table in tables)
    assert found.bytes_per_rank == (sum(table.rows for table in tables) * (64 + ONE_PROCESS_ROW_STATE_BYTES),)
    assert found.all_to_all_bytes_per_rank == found.id_bytes_per_rank == (0.0,)
    assert found.replicated_gradient_bytes == 0
    assert found.cost_per_rank[0] > 0


@pytest.mark.parametrize("table_decay", [0.0, 0.1])
def test_row_state_of_one_process_is_what_its_optimizer_holds(table_decay: float) -> None:
    rows, dim = 50, 8
    table = torch.nn.Parameter(torch.ones(rows, dim))
    optimizer = RowWiseAdagrad([table], lr=0.1, table_decay=table_decay)
    torch.nn.functional.embedding(torch.tensor([1, 2, 2]), table, sparse=True).sum().backward()
    optimizer.step()
    state = sum(tensor.nbytes for tensor in optimizer.state[table].values())
    a_row = ONE_PROCESS_ROW_STATE_BYTES + (TABLE_DECAY_ROW_BYTES if table_decay else 0)
    alone = ZIONEX.with_ranks("1x1")
    found = place((_table(0, rows),), dim, alone, global_batch=2, row_state_bytes=a_row)
    assert found.heaviest_bytes == table.nbytes + state


def test_small_tables_are_replicated() -> None:
    cluster, batch = ZIONEX.with_ranks("2x8"), 65_536
    a_rank = batch // cluster.ranks
    tables = (_table(0, 100), _table(1, a_rank), _table(2, a_rank + 1), _table(3, 10**6))
    found = place(tables, 64, cluster, global_batch=batch)
    assert found.replicated == ("t0", "t1")
    assert found.replicated_gradient_bytes == (100 + a_rank) * 64 * 4
    assert {shard.table for shard in found.shards} == {"t2", "t3"}


def test_the_compact_placement_where_only_that_fits() -> None:
    cluster, dim, batch = ZIONEX.with_ranks("1x8"), 64, 65_536
    tables = zipf_tables(40, 1, largest=1e7)
    balanced = place(tables, dim, cluster, global_batch=batch)
    mean = sum(table.rows * (4 * dim + 4) for table in tables) // cluster.ranks
    compact = place(tables, dim, cluster, global_batch=batch, memory_bytes=int(1.05 * mean))
    assert compact.heaviest_bytes < balanced.heaviest_bytes
    assert max(compact.cost_per_rank) > max(balanced.cost_per_rank)
    assert compact.replicated == ()


def test_tables_of_several_lengths_weigh_as_many_columns_as_they_have() -> None:
    tables, dims = zipf_tables(12, 3, largest=1e7), (64, 4, 8) * 4
    found = place(tables, dims, ZIONEX.with_ranks("1x4"), global_batch=4096)
    columns = {
        name: sum(s.columns for s in found.shards if s.table == name)
        for name in {s.table for s in found.shards}
    }
    by_name = {table.name: (table.rows, dim) for table, dim in zip(tables, dims, strict=True)}
    assert all(by_name[name][1] == width for name, width in columns.items())
    weights = sum(rows * dim * 4 for name, (rows, dim) in by_name.items() if name in columns)
    states = sum(4 * by_name[shard.table][0] for shard in found.shards)
    copies = sum(by_name[name][0] * (4 * by_name[name][1] + 4) for name in found.replicated)
    assert sum(found.bytes_per_rank) == weights + states + 4 * copies


def test_placements_are_deterministic_and_kept() -> None:
    tables, cluster = zipf_tables(60, 5), ZIONEX.with_ranks("2x8")
    first = place(tables, 64, cluster, global_batch=4096)
    assert place(tables, 64, cluster, global_batch=4096) is first
    table_placement._balanced.cache_clear()
    again: Placement = place(tables, 64, cluster, global_batch=4096)
    assert again is not first
    assert again == first


@pytest.mark.parametrize(
    ("ranks", "words"), [("1x1", "it takes"), ("1x8", "a shard of 8 of its 64 columns takes")]
)
def test_a_table_that_fits_nowhere_is_named(ranks: str, words: str) -> None:
    tables = (_table(0, 1000), Table(name="user_id", rows=10**8))
    with pytest.raises(PlacementError, match=r"table 'user_id' fits on no rank") as caught:
        place(tables, 64, ZIONEX.with_ranks(ranks), global_batch=4096, memory_bytes=2**30)
    message = str(caught.value)
    assert words in message
    width = 64 if ranks == "1x1" else 8
    assert f"{2**30 // (4 * width + 4):,} of its 100,000,000 rows would fit" in message
    assert caught.value.lacking_bytes >= 10**8 * (4 * width + 4) - 2**30


def test_tables_that_do_not_fit_together() -> None:
    tables = tuple(_table(i, 10**6) for i in range(100))
    with pytest.raises(
        PlacementError, match="the tables do not fit: the fullest of 8 ranks would hold"
    ) as caught:
        place(tables, 64, ZIONEX.with_ranks("1x8"), global_batch=4096, memory_bytes=2**30)
    assert "More ranks" in str(caught.value)
    assert 2 * 2**30 < caught.value.lacking_bytes < 3 * 2**30
