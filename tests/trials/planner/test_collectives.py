"""The alpha-beta model of collectives: NCCL's factors, its algebra, who may take part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.values import parse
from trials.cluster.cluster import Cluster
from trials.planner.collectives import COLLECTIVE_SECONDS, Collectives, collectives

MEASURED: dict[str, Any] = {
    "verified": True,  # bandwidths count as they are
    "hosts": 4,
    "gpus_per_host": 8,
    "hbm": "80GiB",
    "host_memory_bytes": "1TB",
    "memory_bandwidth": "2TB/s",
    "peak_flops": {"fp32": "20TFLOP/s", "bf16": "300TFLOP/s"},
    "host_link_bandwidth": "32GB/s",
    "nvlink": {"bandwidth": 240e9, "latency": 3e-6},
    "network": {"bandwidth": 25e9, "latency": 14e-6},
}
GROUPS = st.tuples(st.integers(1, 64), st.integers(1, 16))
SIZES = st.floats(1.0, 1e11)
SINGLE = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


def cluster(**changes: Any) -> Cluster:
    """Four hosts of eight, without shares of what data sheets promise."""
    return parse(Cluster, MEASURED | changes, "test")


def without_latency() -> Cluster:
    return cluster(nvlink={"bandwidth": 240e9, "latency": 0}, network={"bandwidth": 25e9, "latency": 0})


def seconds(found: Collectives, size_bytes: float) -> list[float]:
    return [getattr(found, name)(size_bytes) for name in SINGLE]


def test_one_rank_needs_no_time() -> None:
    assert seconds(collectives(cluster(), 1, 1), 1e9) == [0.0] * 4


def test_bus_bandwidth_factors_in_a_host() -> None:
    """nccl-tests, doc/PERFORMANCE.md: (n-1)/n, for all-reduce twice that."""
    found = collectives(without_latency(), 1, 8)
    gather, scatter, exchange, reduce = [s - COLLECTIVE_SECONDS for s in seconds(found, 240e9)]
    assert gather == scatter == pytest.approx(7 / 8)
    assert (exchange, reduce) == pytest.approx((7 / 8, 14 / 8))


def test_a_ring_over_hosts_shares_all_network_cards() -> None:
    """Eight cards of 25 GB/s carry it together; with more cards NVLink is what bounds it."""
    found = collectives(without_latency(), 4, 8)
    assert found.all_gather.beta == pytest.approx(31 / 32 / 200e9)
    assert found.all_to_all.beta == pytest.approx(24 / 32 / 25e9)
    assert collectives(without_latency(), 4, 16).all_gather.beta == pytest.approx(63 / 64 / 240e9)
    assert collectives(without_latency(), 4, 1).all_gather.beta == pytest.approx(3 / 4 / 25e9)


def test_latency_counts_steps_by_link() -> None:
    """31 steps of a ring over 4 hosts of 8: 3 cross the network."""
    found = collectives(cluster(), 4, 8)
    assert found.all_gather.alpha == pytest.approx(COLLECTIVE_SECONDS + 28 * 3e-6 + 3 * 14e-6)
    assert found.tree.alpha == pytest.approx(COLLECTIVE_SECONDS + 2 * (7 * 3e-6 + 2 * 14e-6))


def test_trees_are_for_small_tensors_on_many_ranks() -> None:
    found = collectives(cluster(), 32, 8)
    assert found.all_reduce(1e6) == found.tree(1e6) < found.ring(1e6)
    assert found.all_reduce(1e12) == found.ring(1e12) < found.tree(1e12)


NCCL_LINKS: dict[str, Any] = {
    "verified": False,
    "nvlink": {"bandwidth": 300e9, "latency": 3.4e-6},
    "network": {"bandwidth": 25e9, "latency": 14e-6},
}
"""Links of data sheets, with the latencies of NCCL's own model."""


def test_over_nvlink_short_hops_win_for_small_tensors_and_bandwidth_for_large_ones() -> None:
    """NCCL's protocol LL128, with the latencies of its src/graph/tuning.cc in microseconds."""
    found = collectives(cluster(**NCCL_LINKS), 32, 8)
    usable = 8 * 0.9 * 25e9
    gather = 14e-6 + 224 * 1.9e-6 + 31 * 4e-6
    assert found.all_gather(1e6) == pytest.approx(gather + 1e6 * 255 / 256 / (0.92 * usable))
    tree = 14e-6 + 2 * (7 * 1.25e-6 + 5 * 8.5e-6)
    assert found.all_reduce(1e6) == pytest.approx(tree + 2e6 / (0.92 * 120 / 128 * usable))
    assert found.all_gather(1e10) == found.all_gather.alpha + 1e10 * found.all_gather.beta
    assert found.all_reduce(1e12) == found.ring.alpha + 1e12 * found.ring.beta
    # one rank per host: nothing hides a hop, so a ring's takes as long as a tree's, and its bandwidth is less
    alone = collectives(cluster(**NCCL_LINKS), 32, 1).all_gather(1e6)
    assert alone == pytest.approx(14e-6 + 31 * 8.5e-6 + 1e6 * 31 / 32 / (0.7 * 0.9 * 25e9))


@given(GROUPS, SIZES, st.floats(1.0, 8.0), st.booleans())
def test_more_bandwidth_or_less_latency_never_slows(
    group: tuple[int, int], size_bytes: float, factor: float, verified: bool
) -> None:
    before = seconds(collectives(cluster(verified=verified), *group), size_bytes)
    for link in ("nvlink", "network"):
        data = MEASURED[link]
        wider = cluster(verified=verified, **{link: data | {"bandwidth": factor * data["bandwidth"]}})
        quicker = cluster(verified=verified, **{link: data | {"latency": data["latency"] / factor}})
        for better in (wider, quicker):
            after = seconds(collectives(better, *group), size_bytes)
            assert all(a <= b * (1 + 1e-12) for a, b in zip(after, before, strict=True))


@given(GROUPS, SIZES, SIZES, st.booleans())
def test_time_grows_with_size_and_one_call_beats_two(
    group: tuple[int, int], a: float, b: float, verified: bool
) -> None:
    found = collectives(cluster(verified=verified), *group)
    together, apart = seconds(found, a + b), [seconds(found, a), seconds(found, b)]
    for one, first, second in zip(together, *apart, strict=True):
        assert max(first, second) <= one * (1 + 1e-12)
        assert one <= (first + second) * (1 + 1e-12)


@given(GROUPS, SIZES, st.booleans())
def test_all_reduce_is_at_most_a_scatter_and_a_gather(
    group: tuple[int, int], size_bytes: float, verified: bool
) -> None:
    found = collectives(cluster(verified=verified), *group)
    both = found.reduce_scatter(size_bytes) + found.all_gather(size_bytes)
    assert found.all_reduce(size_bytes) <= both * (1 + 1e-12)


def test_data_sheets_are_taken_with_a_share_and_measured_links_are_not() -> None:
    measured, promised = collectives(cluster(), 1, 8), collectives(cluster(verified=False), 1, 8)
    assert promised.all_gather.beta == pytest.approx(measured.all_gather.beta / 0.8)
