"""What becomes of a candidate of which a rank is slow, on hosts that are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest
from faulty_ranks import task

from trials.records.events import EVENTS, EventWriter, FailureEvent, SlowRank
from trials.records.trial_record import MOVED
from trials.runtime.hosts import hosts as all_hosts
from trials.runtime.hosts import run as runs
from trials.runtime.hosts.hosts import Hosts, MemberHost, Node
from trials.runtime.hosts.placement import Place, Shape
from trials.runtime.hosts.ray_connection import Head
from trials.runtime.hosts.run import MOST_MOVES, HostsLauncher, HostsRun

ROOM = {"CPU": 2.0}
TOLD = SlowRank(rank=1, times=9.6, examples=100, seconds=6.0)


class FakeMember(MemberHost):
    """A host whose ranks end when they are told to."""

    def __init__(self, name: str) -> None:
        self.node, self.why_gone, self.ranks = Node(name, "10.0.0.1", 2.0, 0.0), None, {}

    @property
    def is_ready(self) -> bool:
        return True

    def call(self, method: str, *arguments: object) -> None:
        if method == "kill":
            for rank in self.ranks.values():
                rank.exitcode, rank.killed = -9, "running"
            self.ranks.clear()


class FakeHosts(Hosts):
    """Two nodes, `a` and `b`."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(Head(), said.append)
        self.fakes = {name: FakeMember(name) for name in "ab"}

    def hear(self) -> None:
        pass

    def ready(self) -> list[MemberHost]:
        return [*self.fakes.values()]


class FakeReservation:
    def __init__(self, nodes: Set[str]) -> None:
        self.nodes = frozenset(nodes)

    def places(self) -> tuple[Place, ...]:
        return (Place(min(self.nodes), ()),)

    def cancel(self) -> None:
        pass


class FakeReservations:
    """The first of the nodes that are asked for, at once."""

    def ask(self, wanted: Shape, nodes: Set[str]) -> FakeReservation:
        return FakeReservation(nodes)

    def room_on(self, node: str, resource: str) -> float:
        return 0.0

    def give_back(self, reservation: FakeReservation) -> None:
        pass

    def drop_idle(self, seconds: float) -> None:
        pass


class Cluster:
    """Two nodes, of which a candidate with two ranks takes one."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.hosts = FakeHosts(self.said)
        self.launcher = HostsLauncher(self.hosts)
        self.launcher.reservations = FakeReservations()  # type: ignore[assignment]
        self._folder = folder

    def start(self) -> HostsRun:
        """An attempt of the one candidate."""
        return self.launcher.start(task(hosts=1, gpus_per_host=2), self._folder)

    def told(self, run: HostsRun) -> list[SlowRank | FailureEvent]:
        """What is said once its ranks have said that one of them is slow."""
        with EventWriter(self._folder / EVENTS) as emit:
            emit(TOLD)
        return [event for event in run.new_events() if isinstance(event, (SlowRank, FailureEvent))]

    def places(self) -> set[str]:
        return {name for name, member in self.hosts.fakes.items() if member.ranks}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """What is free on the nodes; on `a` the candidate has all."""
    nodes = {"a": {"CPU": 0.0}, "b": dict(ROOM)}
    monkeypatch.setattr(runs, "free_on_nodes", lambda: nodes)
    return nodes


@pytest.fixture
def cluster(tmp_path: Path, free: Mapping[str, object]) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.hosts.close()


def test_it_moves_where_another_node_has_room(cluster: Cluster) -> None:
    run = cluster.start()
    assert cluster.places() == {"a"}
    slow, failed = cluster.told(run)
    assert isinstance(slow, SlowRank)
    assert isinstance(failed, FailureEvent)
    assert failed.slow
    assert not failed.killed
    assert failed.error == slow.words
    assert slow.words.startswith("rank 1 on node 10.0.0.1 (a) is slow: it takes 9.6 times as long")
    assert slow.words.endswith(MOVED)
    assert run.ended
    assert cluster.said == ["node 10.0.0.1 (a) is avoided for 10 minutes while others have room: it is slow"]
    cluster.start()
    assert cluster.places() == {"b"}


def test_it_trains_on_without_room_and_moves_once_there_is(
    cluster: Cluster, free: dict[str, dict[str, float]]
) -> None:
    free["b"] = {"CPU": 1.0}
    run = cluster.start()
    (slow,) = cluster.told(run)
    assert isinstance(slow, SlowRank)
    assert slow.words.endswith("and trains on, as no other node has room")
    assert cluster.told(run) == []  # it is said once
    assert not run.ended
    free["b"] = dict(ROOM)
    assert [type(event) for event in cluster.told(run)] == [SlowRank, FailureEvent]
    assert run.ended


def test_where_nothing_is_known_of_room_it_trains_on(
    cluster: Cluster, free: dict[str, dict[str, float]]
) -> None:
    free.clear()  # as through Ray's client
    run = cluster.start()
    assert len(cluster.told(run)) == 1
    assert not run.ended


def test_it_is_moved_twice_at_most(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_hosts, "AVOID_SECONDS", 0.0)  # each node is soon as good as any
    for _ in range(MOST_MOVES):
        assert len(cluster.told(cluster.start())) == 2
    run = cluster.start()
    (slow,) = cluster.told(run)
    assert isinstance(slow, SlowRank)
    assert slow.words.endswith("and trains on, as the candidate was moved 2 times already")
    assert not run.ended


def test_a_slow_node_is_used_where_no_other_has_room_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.told(cluster.start())
    monkeypatch.setattr(FakeReservation, "places", on_a)  # others have taken the other one meanwhile
    waiting = cluster.start()
    assert waiting.new_events() == []
    assert cluster.places() == set()
    monkeypatch.setattr(runs, "AVOIDING_SECONDS", 0.0)
    waiting.new_events()
    assert cluster.places() == {"a"}
    assert cluster.said[-1] == "node 10.0.0.1 (a) is slow, and is used as no other node has room"


def test_it_is_avoided_for_some_time_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_hosts, "AVOID_SECONDS", 0.0)
    cluster.told(cluster.start())
    cluster.start()
    assert cluster.places() == {"a"}


def on_a(reservation: FakeReservation) -> tuple[Place, ...] | None:
    """Its place once it may be on the node `a`."""
    return (Place("a", ()),) if "a" in reservation.nodes else None
