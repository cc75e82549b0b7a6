"""Where tables lie that the device has no room for: how large their cache is, which level is taken, and why."""

from __future__ import annotations

import pytest
import torch

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from dhen.values import parse
from trials.cluster.cluster import CUDA_CONTEXT_BYTES, Cluster
from trials.data.prepare.fit import repeats_of
from trials.planner.collectives import (
    ALLOCATOR_RESERVE_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    LEAST_RESERVE_BYTES,
)
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan
from trials.planner.pricing import CostModel
from trials.planner.table_memory import LEFT_FREE, hits_of
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import KIB, Strategy, named

MIB = 2**20

SCHEMA = FeatureSchema(
    tables=(Table(name="user", rows=200_000), Table(name="item", rows=50_000), Table(name="day", rows=7)),
    numeric=("x",),
)
MODEL = parse_model({"embedding_dim": 16, "layers": [{"modules": ["mlp"], "out_embeddings": 4}]}, "test")
TRAINING = TrainingConfig(batch_size=512, precision="fp32", epochs=1)
WHOLE = 250_007 * (16 * 4 + 12)
"""Bytes of all rows with what their optimizer has."""
STORED = 250_007 * (16 * 4 + 4)


def cluster(hbm: str, host: str = "64GB", device: str = "cuda") -> Cluster:
    return parse(
        Cluster,
        {
            "hosts": 1,
            "gpus_per_host": 1,
            "device": device,
            "hbm": hbm,
            "host_memory_bytes": host,
            "memory_bandwidth": "1TB/s",
            "peak_flops": {"fp32": "10TFLOP/s", "bf16": "100TFLOP/s"},
            "host_link_bandwidth": "20GB/s",
        },
        "test",
    )


def made(hbm: str, host: str = "64GB", device: str = "cpu", technique: str | None = None) -> Plan:
    options = PlanOptions(technique=named(technique) if technique else None)
    return plan(MODEL, SCHEMA, TRAINING, cluster(hbm, host, device), options=options)


def test_tables_stay_on_the_device_as_long_as_they_fit() -> None:
    assert made("1GiB").chosen == Strategy()


def test_tables_that_the_device_has_no_room_for_lie_in_host_memory_and_the_plan_says_why() -> None:
    found = made("8MiB")
    assert found.best is not None
    assert found.chosen.tables == "host"
    assert {priced.strategy.tables for priced in found.strategies} == {"host", "ssd"}
    assert "Tables on the device: table 'user' fits on no rank" in found.notes[0]
    assert found.best.memory.needed <= (1 - LEFT_FREE) * found.hbm
    assert found.best.memory.needed > (1 - LEFT_FREE) * found.hbm - 2 * KIB  # the cache takes what is left
    assert found.best.memory.host == STORED + 8 * 250_007
    assert found.remedy is None


@pytest.mark.parametrize("tensors", [60 * MIB, 700 * MIB])
def test_a_cache_on_a_gpu_takes_what_its_allocator_leaves(tensors: int) -> None:
    """Which holds as much again as few tensors take, and 512 MiB beyond many."""
    schema = SCHEMA.replace(tables=tuple(each.replace(rows=20_000_000) for each in SCHEMA.tables))
    beside = CUDA_CONTEXT_BYTES + CUBLAS_WORKSPACE_BYTES
    reserve = min(ALLOCATOR_RESERVE_BYTES, max(LEAST_RESERVE_BYTES, tensors))
    there = cluster(str(beside + tensors + reserve), device="cuda")
    best = plan(MODEL, schema, TRAINING, there, options=PlanOptions(technique=named("dp+host_tables"))).best
    assert (1 - LEFT_FREE) * there.hbm - 4 * KIB < best.memory.needed <= (1 - LEFT_FREE) * there.hbm
    assert best.memory.reserve <= reserve


def test_tables_that_host_memory_has_no_room_for_lie_on_the_ssd() -> None:
    found = made("8MiB", host="16MiB")
    assert found.chosen.tables == "ssd"
    alike = found.chosen.replace(tables="host", table_cache=0).name
    (in_memory,) = [each for each in found.strategies if each.strategy.replace(table_cache=0).name == alike]
    assert not in_memory.fits
    assert "of a host's memory, which has 16" in in_memory.reason


def test_a_cpus_memory_is_the_hosts() -> None:
    """A cache does not take what the tables below it need."""
    both = STORED + 8 * 250_007 + 8 * 2**20
    fits, lacks = (made("64MiB", host=str(size), technique="host_tables") for size in (both, STORED))
    assert fits.best.memory.needed + fits.best.memory.host <= both
    assert lacks.best is None
    apart = made("8GiB", host=str(both), device="cuda", technique="host_tables").best
    assert apart.memory.embedding_shards == WHOLE  # an accelerator's is not


def test_no_level_makes_room_for_a_batch_that_does_not_fit() -> None:
    found = made("512KiB")
    assert found.chosen is None
    assert "Nothing fits 512 KiB per rank" in found.remedy


def test_a_step_that_reads_every_row_and_several_ranks_keep_tables_on_the_device() -> None:
    decayed = TRAINING.replace(table_decay=0.1, weight_average=2)
    pair = cluster("8MiB", device="cpu").replace(
        gpus_per_host=2, nvlink={"bandwidth": "1GB/s", "latency": "1us"}
    )
    below = "technique=dp\\+host_tables"
    for training, where, words, remedy in (
        (decayed, cluster("8MiB", device="cpu"), f"table_decay=0.1 is planned with .*{below} excl", True),
        (TRAINING, pair, f"{below} is not on the ladder", False),
    ):
        unfit = plan(MODEL, SCHEMA, training, where)
        assert not unfit.strategies
        assert ("with table_decay=0 tables could lie below the device" in str(unfit.remedy)) == remedy
        with pytest.raises(UserError, match=words):
            plan(MODEL, SCHEMA, training, where, options=PlanOptions(technique=named("dp+host_tables")))


def test_the_size_of_the_cache_can_be_given() -> None:
    found = made("1GiB", technique="ssd_tables=2MiB")
    assert found.chosen == Strategy(tables="ssd", table_cache=2048)
    assert 0 <= 2**21 - found.best.memory.embedding_shards < 100


def test_a_cache_shares_its_rows_among_matrices_and_never_holds_fewer_than_a_batch() -> None:
    model = MODEL.replace(table_dim_exponent=0.3)
    below = CostModel(model, SCHEMA, TRAINING, cluster("1GiB")).below
    assert below.cached_rows(0) == (7, 2 * 512)
    assert below.cached_rows(-(-below.whole_bytes // KIB)) == (7, 250_000)
    for size in (100, 1000, 5000):
        assert below.cache_bytes(size) <= max(size * KIB, below.least_bytes)
    assert below.cached_rows(1000)[1] < below.cached_rows(2000)[1]


def test_a_smaller_cache_makes_a_longer_step() -> None:
    pricing = CostModel(MODEL, SCHEMA, TRAINING, cluster("8GiB"))
    times = [
        pricing.time(Strategy(tables=level, table_cache=size)).total
        for level in ("host", "ssd")
        for size in (16_000, 4000, 1000, 100)
    ]
    assert pricing.time(Strategy()).total < times[0]
    assert times[:4] == sorted(times[:4])
    assert times[4:] == sorted(times[4:])
    assert all(ssd > host for host, ssd in zip(times[:4], times[4:], strict=True))


def drawn(rows: int, exponent: float, count: int) -> torch.Tensor:
    """How often each row of a table occurs among so many ids, by Zipf's law."""
    weights = torch.arange(1, rows + 1).double() ** -exponent
    ids = torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(rows))
    return torch.bincount(ids, minlength=rows)


@pytest.mark.parametrize("exponents", [(1.1, 0.8), (0.0, 2.0)], ids=str)
def test_hits_are_those_of_the_most_frequent_rows_after_their_first_time(
    exponents: tuple[float, float],
) -> None:
    counts = [drawn(30_000, exponents[0], 200_000), drawn(500, exponents[1], 200_000)]
    tables = tuple(
        Table(name=f"t{place}", rows=len(each), repeats=repeats_of(each.numpy()))
        for place, each in enumerate(counts)
    )
    again = torch.cat(counts).sort(descending=True).values.sub(1).clamp(min=0)
    for cached in (30, 100, 1000, 5000, 30_500):
        assert hits_of(tables).share(cached) == pytest.approx(float(again[:cached].sum()) / 400_000, abs=0.01)


def test_counts_of_ids_change_what_a_plan_says_and_not_the_job() -> None:
    counted = Table(name="user", rows=200_000, repeats=repeats_of(drawn(200_000, 0.8, 300_000).numpy()))
    known = SCHEMA.replace(
        tables=tuple(counted if table.name == "user" else table for table in SCHEMA.tables)
    )
    zipf, better = (
        plan(
            MODEL,
            features,
            TRAINING,
            cluster("1GiB", device="cpu"),
            options=PlanOptions(technique=named("host_tables=1MiB")),
        )
        for features in (SCHEMA, known)
    )
    rates = []
    for found in (zipf, better):
        assert found.best.table_hit_rate is not None
        rates.append(found.best.table_hit_rate)
        assert f"About {rates[-1]:.0%} of the ids looked up find their row in the cache." in found.best.reason
    assert rates[1] < rates[0] - 0.05
    jobs = [
        Job(model=MODEL, features=features, log="demo", training=TRAINING, seed=0)
        for features in (SCHEMA, known)
    ]
    assert jobs[0].fingerprint == jobs[1].fingerprint
