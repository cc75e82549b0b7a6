"""Candidates side by side and their threads, on this machine."""

from __future__ import annotations

import pytest

from search.config import read_study_config
from search.execution import attempts
from search.execution import attempts as module
from search.execution.attempts import Parallelism, cluster_parallelism, most_servers, parallelism
from trials.runtime.hosts import placement
from trials.runtime.hosts.hosts import Node
from trials.runtime.hosts.placement import Shape, most_at_once


@pytest.mark.parametrize(
    ("parallel", "threads", "found"),
    [
        (None, None, (4, 2)),
        (None, 4, (2, 4)),
        (None, 1, (4, 1)),
        (None, 16, (1, 16)),
        (2, None, (2, 4)),
        (1, None, (1, 8)),
        (16, None, (16, 1)),
        (3, 5, (3, 5)),
    ],
)
def test_eight_cores_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, parallel: int | None, threads: int | None, found: tuple[int, int]
) -> None:
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    assert parallelism(parallel, threads) == Parallelism(*found, sharing=found[0])


@pytest.mark.parametrize(
    ("shapes", "parallel", "threads", "found"),
    [
        ((1, 2), None, None, Parallelism(4, 2, sharing=4, ranks=4)),
        ((1, 2, 8), None, None, Parallelism(4, 1, sharing=4, ranks=8)),
        ((2, 4), 3, None, Parallelism(3, 1, sharing=3, ranks=6)),
        ((1, 4), 1, 1, Parallelism(1, 1, sharing=1, ranks=4)),
    ],
)
def test_a_larger_shape_takes_the_places_of_several(
    monkeypatch: pytest.MonkeyPatch,
    shapes: tuple[int, ...],
    parallel: int | None,
    threads: int | None,
    found: Parallelism,
) -> None:
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    assert parallelism(parallel, threads, *shapes[:1], shapes[1:]) == found


@pytest.mark.parametrize(
    ("ranks", "parallel", "found"),
    [
        (1, None, Parallelism(8, 2, sharing=1)),
        (2, None, Parallelism(4, 2, sharing=1)),
        (8, None, Parallelism(1, 2, sharing=1)),
        (16, None, Parallelism(1, 1, sharing=2)),
        (1, 3, Parallelism(3, 5, sharing=1)),
        (1, 12, Parallelism(12, 1, sharing=2)),
        (4, 3, Parallelism(3, 1, sharing=2)),
    ],
)
def test_trials_have_accelerators_of_their_own_until_there_are_no_more(
    monkeypatch: pytest.MonkeyPatch, ranks: int, parallel: int | None, found: Parallelism
) -> None:
    monkeypatch.setattr(module, "devices_here", lambda: 8)
    monkeypatch.setattr(module, "cores", lambda: 16)
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    assert parallelism(parallel, None, ranks) == found


def test_a_trial_of_no_declared_ranks_has_all_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "devices_here", lambda: 8)
    assert attempts.shapes_here(read_study_config(None, [])) == (8,)
    assert attempts.shapes_here(read_study_config(None, ["ranks=1x1,1x2"])) == (1, 2)
    assert attempts.shapes_here(read_study_config(None, ["cluster=zionex"])) == (1,)


def nodes(*cpus_and_gpus: tuple[float, float]) -> list[Node]:
    return [Node(str(index), "10.0.0.1", *each) for index, each in enumerate(cpus_and_gpus)]


@pytest.mark.parametrize(
    ("cpus", "ranks", "parallel", "threads", "found"),
    [
        ([8, 8, 8, 8], (1, 2), None, None, Parallelism(16, 1, sharing=4)),  # four on each, as on one machine
        ([8, 8, 8, 8], (1, 2), None, 4, Parallelism(4, 4, sharing=1)),
        ([8, 8, 8, 8], (2, 4), None, 1, Parallelism(4, 1, sharing=2)),
        ([8, 8, 8, 8], (2, 4), 1, None, Parallelism(1, 2, sharing=1)),
        ([8, 8, 8, 8], (3, 8), None, None, Parallelism(1, 1, sharing=1)),  # of four nodes one is left over
        ([8, 2, 2], (2, 2), None, 1, Parallelism(2, 1, sharing=2)),  # one host of each has to be a small one
        ([0, 8], (1, 1), None, 2, Parallelism(4, 2, sharing=4)),  # a head without CPUs holds none
        ([8], (2, 1), None, 1, Parallelism(1, 1, sharing=1)),  # too few: that is said when hosts are admitted
        ([8] * 64, (2, 8), None, None, Parallelism(32, 1, sharing=1)),
    ],
)
def test_as_many_train_at_once_as_the_clusters_nodes_hold(
    monkeypatch: pytest.MonkeyPatch,
    cpus: list[float],
    ranks: tuple[int, int],
    parallel: int | None,
    threads: int | None,
    found: Parallelism,
) -> None:
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    assert cluster_parallelism(nodes(*((each, 0.0) for each in cpus)), ranks, parallel, threads) == found


@pytest.mark.parametrize(
    ("larger", "threads", "found"),
    [
        ([(1, 4)], None, Parallelism(16, 2, sharing=4, ranks=16)),
        ([(1, 8)], None, Parallelism(32, 1, sharing=8, ranks=32)),  # all CPUs of a node for its ranks
        ([(1, 2), (4, 8)], 1, Parallelism(32, 1, sharing=8, ranks=32)),
        (
            [(2, 8)],
            4,
            Parallelism(8, 4, sharing=2, ranks=16),
        ),  # too large: that is said when hosts are admitted
    ],
)
def test_on_a_cluster_the_least_shape_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
    larger: list[tuple[int, int]],
    threads: int | None,
    found: Parallelism,
) -> None:
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    four = nodes(*[(8.0, 0.0)] * 4)
    assert cluster_parallelism(four, (1, 1), None, threads, larger) == found


@pytest.mark.parametrize(
    ("cpus", "ranks", "servers", "threads", "found"),
    [
        ([4, 4, 4, 4], (2, 1), 2, 1, Parallelism(4, 1, sharing=2)),
        ([4, 4, 4, 4], (2, 1), None, 1, Parallelism(4, 1, sharing=2)),  # one per host at most
        ([4, 4, 4, 4], (2, 1), 3, 1, Parallelism(2, 1, sharing=1)),  # two of them are on one host
        ([4, 4], (1, 1), 3, None, Parallelism(2, 1, sharing=1)),
        ([8, 8], (1, 1), 1, 4, Parallelism(2, 4, sharing=1)),
    ],
)
def test_servers_of_tables_take_cpus_too(
    monkeypatch: pytest.MonkeyPatch,
    cpus: list[float],
    ranks: tuple[int, int],
    servers: int | None,
    threads: int | None,
    found: Parallelism,
) -> None:
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    there = nodes(*((each, 0.0) for each in cpus))
    assert cluster_parallelism(there, ranks, None, threads, servers=servers) == found


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ((), 0),
        (("training.tables.synchrony=sync",), None),
        (("training.tables.synchrony=sync", "servers=3"), 3),
        (("training.tables.synchrony=semi", "technique=dp+servers2=ssd"), 2),
        (("training.tables.synchrony=semi", "technique=zero1"), None),
    ],
)
def test_the_most_servers_of_a_study(words: tuple[str, ...], most: int | None) -> None:
    assert most_servers(read_study_config(None, words)) == most


def test_devices_say_how_many_train_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device per rank, and a CPU; threads are beside the point."""
    monkeypatch.setattr(placement, "devices_here", lambda: ("0",))
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    eight = nodes(*[(96.0, 8.0)] * 64)
    assert cluster_parallelism(eight, (1, 2), None, None).side_by_side == 256
    assert cluster_parallelism(eight, (4, 8), None, None).side_by_side == 16
    assert cluster_parallelism(nodes((4.0, 8.0)), (1, 2), None, None).side_by_side == 2  # CPUs are short


def test_more_candidates_than_devices_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with one rank per host; the memory that is planned for is a device's part, and not a node's."""
    monkeypatch.setattr(placement, "devices_here", lambda: ("0",))
    monkeypatch.setattr(module, "fastest_threads", lambda limit: limit)
    two = nodes((96.0, 3.0), (96.0, 3.0))

    def found(ranks: tuple[int, int], parallel: int | None, there: list[Node] = two) -> tuple[int, int, int]:
        shares = cluster_parallelism(there, ranks, parallel, None)
        return shares.side_by_side, shares.on_device, shares.sharing

    assert found((1, 1), None) == (6, 1, 1)
    assert found((1, 1), 4) == (4, 1, 1)
    assert found((1, 1), 7) == (7, 2, 2)
    assert found((1, 1), 36) == (36, 6, 6)
    assert found((1, 1), 1000) == (1000, 16, 16)
    assert found((2, 1), 7) == (7, 3, 3)
    assert found((1, 3), 7) == (7, 1, 1)  # ranks of one candidate have devices of their own
    assert found((1, 1), 20, nodes((6.0, 2.0))) == (20, 3, 3)  # more than three find no CPU
    assert found((1, 1), 2, nodes((6.0, 0.0))) == (2, 1, 1)


@pytest.mark.parametrize("on_device", range(1, 17))
def test_parts_of_a_device_fit_on_it(on_device: int) -> None:
    part = placement.part_of_a_device(on_device)
    assert placement.room_for(Shape(1, 1.0, part), 96.0, 2.0) == 2 * on_device
    assert on_device * round(part * 10_000) <= 10_000


def test_candidates_of_several_hosts_are_never_on_one_node_twice() -> None:
    assert most_at_once(2, [9, 1]) == 1
    assert most_at_once(2, [9, 1, 1]) == 2
    assert most_at_once(2, [3, 3, 2]) == 4
    assert most_at_once(2, [9]) == 0
    assert most_at_once(1, []) == 0
