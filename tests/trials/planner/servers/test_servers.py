"""Servers of tables in plans: how many, what they hold, what waits for them, and what a plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Growing, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan
from trials.planner.pricing import CostModel
from trials.records.job import Synchrony, TablesConfig, TrainingConfig
from trials.records.strategy import Strategy, named

MODEL = parse_model({"embedding_dim": 128, "layers": [{"modules": ["dlrm"]}] * 2}, "test")
GIB = 2**30


def schema(rows: int) -> FeatureSchema:
    return FeatureSchema(
        tables=(Table(name="user", rows=rows), Table(name="item", rows=1_000_000)), numeric=("a",)
    )


def training(synchrony: Synchrony = "semi", **tables: Any) -> TrainingConfig:
    return TrainingConfig(
        batch_size=65536, precision="bf16", tables=TablesConfig(synchrony=synchrony, **tables)
    )


def zionex(ranks: str = "16x8") -> Cluster:
    return load_cluster("zionex").with_ranks(ranks)


def pricing(
    synchrony: Synchrony = "semi", rows: int = 10**9, ranks: str = "16x8", **tables: Any
) -> CostModel:
    return CostModel(MODEL, schema(rows), training(synchrony, **tables), zionex(ranks))


def made(rows: int, synchrony: Synchrony = "semi", cluster: Cluster | None = None, **options: Any) -> Plan:
    options |= {"technique": named(options["technique"])} if "technique" in options else {}
    return plan(MODEL, schema(rows), training(synchrony), cluster or zionex(), options=PlanOptions(**options))


def test_a_server_has_its_part_of_all_rows_and_a_host_its_part_of_the_servers() -> None:
    found = pricing()
    assert found.kept.rows == (10**9 + 10**6) * (128 * 4 + 4)
    for servers, on_fullest in ((1, 1), (8, 1), (16, 1), (17, 2), (40, 3)):
        memory = found.memory(Strategy(servers=servers))
        assert memory.servers == on_fullest * -(-found.kept.rows // servers)
    assert found.memory(Strategy(servers=4, server_level="ssd")).servers == 0


def test_the_fewest_servers_with_room_are_enough_and_one_fewer_are_not() -> None:
    found = pricing(rows=8 * 10**9)
    fewest = found.kept.fewest("memory", 16, found.room_for_servers)
    assert fewest is not None
    assert fewest > 1
    fits = [found.lacking_bytes(found.memory(Strategy(servers=n))) == 0 for n in (fewest - 1, fewest)]
    assert fits == [False, True]


def test_tables_in_memory_where_hosts_have_room_and_on_ssds_where_they_have_none() -> None:
    in_memory, on_ssd = made(10**9).chosen, made(60 * 10**9).chosen
    assert (in_memory.server_level, on_ssd.server_level) == ("memory", "ssd")


def test_asked_for_servers_are_taken_whatever_the_way() -> None:
    names = {
        found.name
        for found in (
            made(10**8, servers=3).chosen,
            made(10**8, technique="dp+servers3").chosen,
            made(10**8, servers=3, technique="dp").chosen,
        )
        if found is not None
    }
    assert names == {"dp+servers3"}
    sharded = made(10**8, servers=3, technique="fsdp").chosen
    assert sharded.held_as == "fsdp+servers3"


def test_too_few_servers_say_how_many_would_do() -> None:
    found = made(4 * 10**9, technique="dp+servers1")
    assert found.chosen is None
    assert "servers=2 or +servers1=ssd would do" in found.remedy
    two = made(4 * 10**9, technique="dp+servers2").chosen
    assert two is not None


def test_servers_and_the_ranks_of_a_cpu_share_a_host() -> None:
    data = zionex().to_dict() | {"device": "cpu", "host_memory_bytes": "40GiB", "sources": {}}
    cluster = Cluster.model_validate(data).with_ranks("1x2").with_hbm(16 * GIB)
    found = CostModel(MODEL, schema(10**7), training(), cluster)
    memory = found.memory(Strategy(servers=2))
    assert found.host_bytes(memory) == 2 * memory.total + memory.servers


@pytest.mark.parametrize(
    ("synchrony", "options", "said"),
    [
        ("local", {"technique": "dp+servers2"}, "synchrony=local has tables on the ranks"),
        ("semi", {"technique": "tensor2"}, "whole dense part each"),
        ("async", {"technique": "fsdp"}, "give technique=dp, or synchrony=semi or sync"),
        ("semi", {"technique": "dp+servers2", "servers": 3}, "different numbers of servers"),
    ],
)
def test_what_does_not_go_together_is_said(synchrony: Synchrony, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        made(10**6, synchrony, **options)


def test_more_servers_than_rows_of_a_growing_table_are_refused() -> None:
    growing = Table(name="user", rows=4, growing=Growing(capacity=3))
    inputs = FeatureSchema(tables=(growing,), numeric=("a",))
    with pytest.raises(UserError, match="give servers=3 at most"):
        plan(MODEL, inputs, training(), zionex(), options=PlanOptions(servers=4))


def test_tables_that_fit_on_no_rank_are_offered_servers() -> None:
    found = made(60 * 10**9, "local")
    assert found.chosen is None
    assert "training.tables.synchrony=semi" in found.remedy


def test_semi_hides_what_it_can_and_sync_nothing() -> None:
    ahead, sync = pricing("semi"), pricing("sync")
    strategy = Strategy(servers=16)
    time, alone = ahead.time(strategy), sync.time(strategy)
    hidden = ahead.servers_time(strategy)
    assert hidden.hidden == pytest.approx(
        min(hidden.pull + hidden.push, time.total - hidden.total + hidden.hidden)
    )
    assert time.servers == pytest.approx(hidden.total)
    assert sync.servers_time(strategy).hidden == 0
    assert pricing("semi", staleness=0).servers_time(strategy).hidden == 0
    delayed = pricing("semi", staleness=2, deterministic_delay=True).servers_time(strategy)
    assert 0 < delayed.hidden <= delayed.push
    assert time.total < alone.total


def test_ranks_that_train_alone_reduce_nothing_and_have_a_batch_each() -> None:
    found = made(10**8, "async")
    assert found.best.time.all_reduce == 0
    assert found.examples_per_rank == 65536
    assert found.best.batches_at_once == 128
    assert found.best.seconds_per_batch == found.best.time.total / 128
    assert found.best.memory.optimizer_state == 0


def test_the_reason_says_room_bytes_and_what_is_hidden() -> None:
    best = made(60 * 10**9).best
    assert best is not None
    for words in (
        "do not fit in the memory of 16 hosts",
        "servers with SSD",
        "a rank pulls",
        "hidden behind",
    ):
        assert words in best.reason
    notes = " ".join(made(10**8).notes)
    assert "Prediction" in notes
    for mode in ("sync", "semi", "async"):
        assert f"{mode} " in notes
