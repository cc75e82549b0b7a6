"""Clusters: quantities with units, the catalog and its sources, declared ranks and memory, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from dhen.values import dump_yaml, parse
from trials.cluster.cluster import (
    SIZES,
    Cluster,
    parse_bytes,
    parse_flops,
    parse_quantity,
    parse_rate,
    parse_signed_bytes,
    parse_time,
)
from trials.cluster.this_machine import catalog, load_cluster

NAMES = sorted(catalog())
OWN: dict[str, Any] = {
    "hosts": 2,
    "gpus_per_host": 4,
    "hbm": "80GiB",
    "host_memory_bytes": "1TB",
    "memory_bandwidth": "2TB/s",
    "peak_flops": {"fp32": "19.5TFLOP/s", "bf16": "312TFLOP/s"},
    "host_link_bandwidth": "32GB/s",
    "nvlink": {"bandwidth": "300GB/s", "latency": "5us"},
    "network": {"bandwidth": "200Gb/s", "latency": "10us"},
    "sources": {"hosts": "the rack"},
}


def test_quantities_with_and_without_units() -> None:
    assert [parse_bytes(x) for x in ("80GiB", "80 GB", 7, "1e3", "0.5KiB")] == [
        80 * 2**30,
        80 * 10**9,
        7,
        1000,
        512,
    ]
    assert [parse_rate(x) for x in ("300GB/s", "200Gb/s", "1GiB/s", 5.0)] == [3e11, 2.5e10, 2.0**30, 5.0]
    assert [parse_flops(x) for x in ("312TFLOP/s", "19.5TFLOPS")] == [312e12, 19.5e12]
    assert [parse_time(x) for x in ("3.4us", "5µs", "2ms", "5e-6", 0)] == [3.4e-6, 5e-6, 2e-3, 5e-6, 0.0]


@given(st.floats(0, 1e6), st.sampled_from(sorted(SIZES)))
def test_a_unit_is_a_factor(number: float, unit: str) -> None:
    assert parse_quantity(f"{number!r} {unit}", SIZES, "") == pytest.approx(number * SIZES[unit], rel=1e-12)


@pytest.mark.parametrize(
    "value", ["80G", "80gb", "GiB", "-1GB", "", None, True, [1], float("nan"), float("inf"), 0]
)
def test_what_is_no_size_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="80GiB"):
        parse_bytes(value)


def test_a_margin_has_one_minus_at_most() -> None:
    margins = ("512MiB", "-512MiB", "- 1 KiB", -7, 7, 0)
    assert [parse_signed_bytes(x) for x in margins] == [2**29, -(2**29), -1024, -7, 7, 0]
    with pytest.raises(ValueError, match="-512MiB"):
        parse_signed_bytes("--512MiB")


@pytest.mark.parametrize("name", NAMES)
def test_each_number_of_the_catalog_has_its_source(name: str) -> None:
    cluster = load_cluster(name)
    assert list(cluster.sources) == list(cluster.numbers())
    assert not any(source.startswith("your file") for source in cluster.sources.values())
    assert cluster.name == name
    assert "nverified" in cluster.description
    assert not cluster.verified


def test_the_paper_s_pods() -> None:
    pods = load_cluster("zionex").with_ranks("32x8")
    assert pods.ranks == 256
    assert (pods.nvlink.bandwidth, pods.network.bandwidth) == (300e9, 25e9)
    assert pods.hbm < 40 * 2**30
    assert pods.peak_flops.bf16 == 312e12


def test_declared_ranks_and_memory_say_so() -> None:
    small = load_cluster("zionex").with_ranks("2x4").with_hbm(24 * 2**20)
    assert (small.hosts, small.gpus_per_host, small.hbm) == (2, 4, 24 * 2**20)
    assert small.sources["hosts"] == "declared: ranks=2x4"
    assert small.sources["hbm"] == "declared: hbm=24 MiB"
    assert hash(small) != hash(small.with_hbm(25 * 2**20))


@pytest.mark.parametrize("ranks", ["8", "0x4", "2x", "-2x4", "2 by 4", "2x4x1"])
def test_ranks_that_are_not_hosts_times_ranks(ranks: str) -> None:
    with pytest.raises(UserError, match="such as 2x4, received"):
        load_cluster("zionex").with_ranks(ranks)


def test_links_are_asked_for_where_they_are_needed() -> None:
    desktop = load_cluster("rtx-4090")
    with pytest.raises(UserError, match=r"ranks=1x2: nvlink is missing"):
        desktop.with_ranks("1x2")
    with pytest.raises(UserError, match=r"ranks=2x1: network is missing"):
        desktop.with_ranks("2x1")


def test_a_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(dump_yaml(OWN))
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.ranks, cluster.hbm) == ("ours", 8, 80 * 2**30)
    assert cluster.sources["hosts"] == "the rack"
    assert cluster.sources["nvlink.latency"] == "your file ours.yaml"
    assert parse(Cluster, cluster.to_dict(), "again") == cluster


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": "80GiB"}, r"unknown key 'memory'.*Known: .*hbm"),
        ({"hbm": "80Gb"}, r"hbm: unknown unit 'Gb'.*80GiB.*received '80Gb'"),
        ({"hbm": 0}, r"hbm: must be greater than 0, such as 80GiB"),
        ({"hosts": 0}, r"hosts: .*greater than 0"),
        ({"hosts": -1}, r"hosts: .*greater than 0"),
        ({"hosts": "two"}, r"hosts: .*valid integer"),
        ({"nvlink": {"bandwidth": "300GB/s"}}, r"'nvlink.latency' is missing"),
        (
            {"nvlink": {"bandwith": "300GB/s", "latency": 0}},
            r"unknown key 'nvlink.bandwith'.*nvlink.bandwidth",
        ),
        ({"network": None}, "network is missing"),
        (
            {"sources": {"nvlink.bandwith": "x"}},
            r"sources: unknown key 'nvlink.bandwith'.*'nvlink.bandwidth'",
        ),
    ],
)
def test_mistakes_in_a_file_name_key_and_remedy(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(dump_yaml(OWN | change))
    with pytest.raises(UserError, match=says):
        load_cluster(str(path))


def test_unknown_clusters_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Did you mean 'zionex'.*a100-80gb.*this.*YAML"):
        load_cluster("zionx")
    with pytest.raises(UserError, match="no such file"):
        load_cluster(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="expected a mapping"):
        load_cluster(str(tmp_path / "list.yaml"))


def test_this_machine_is_measured_and_says_how() -> None:
    here = load_cluster("this")
    assert here.hosts == 1
    assert set(here.sources) == set(here.numbers())
    assert all(number > 0 for number in here.numbers().values())
    assert load_cluster("this") is here
