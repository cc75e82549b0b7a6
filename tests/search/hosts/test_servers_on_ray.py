"""Servers of tables on the nodes of a real Ray cluster: what is reserved for them, and what goes on when a node or
a rank is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import TIMEOUT_SECONDS, write_log
from faulty_hosts import MARKS, add_node, ray_cluster
from servers.served_training import Served, a_job, a_task, train_on_servers
from tools import needs

from dhen.errors import UserError
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.events import START_MARK, Event, FailureEvent, ReplacementEvent, TrainingEvent
from trials.records.places import checkpoints_in
from trials.records.strategy import Strategy
from trials.records.task import Task
from trials.runtime.hosts.hosts import Hosts
from trials.runtime.hosts.placement import shape
from trials.runtime.hosts.ray_connection import Head, connected
from trials.runtime.hosts.run import HostsLauncher, HostsRun
from trials.runtime.launcher import wait_for

pytestmark = [*MARKS, needs("ray"), pytest.mark.usefixtures("one_thread")]
CPUS = 3
"""Of each node: the first has a rank and two servers, the second a rank and one."""
LONG = {"epochs": 4, "patience": 999, "evaluate_every": 600, "learning_rate": 5e-5}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster((CPUS, CPUS)) as started, connected("ray"):
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    prepare([write_log(folder / "log.csv", 1510)], out=folder / "log")
    return folder


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def hosts(cluster: Any, folder: Path, said: list[str]) -> Iterator[Hosts]:
    with closing(Hosts(Head(), said.append)) as opened:
        opened.open(PreparedLog.open(folder / "log"), folder)
        yield opened


@pytest.fixture(scope="module")
def launcher(hosts: Hosts) -> HostsLauncher:
    return HostsLauncher(hosts)


def on_two_hosts(folder: Path, synchrony: str, **fields: Any) -> Task:
    """A training of a rank on each of two hosts, and three servers."""
    job = a_job(PreparedLog.open(folder / "log"), {"synchrony": synchrony}, **fields.pop("training", {}))
    return a_task(job, folder / "log", "dp+servers3", 1, hosts=2, **fields)


def train(
    launcher: HostsLauncher,
    task: Task,
    out: Path,
    meanwhile: Callable[[HostsRun, list[Event]], None] = lambda run, events: None,
) -> list[Event]:
    """All that a training on the hosts says; `meanwhile` sees it again and again."""
    out.mkdir(exist_ok=True)
    run, events, began = launcher.start(task, out), list[Event](), time.monotonic()
    while not run.ended:
        wait_for([run])
        events += run.new_events()
        meanwhile(run, events)
        if time.monotonic() - began > TIMEOUT_SECONDS:
            run.kill()
            raise AssertionError("\n".join(path.read_text()[-2000:] for path in sorted(out.glob("*.log"))))
    return events


def process_of(out: Path, name: str) -> int:
    log = (out / f"attempt0.{name}.log").read_text()
    return int(log.rpartition(f"{START_MARK}process ")[2].partition(",")[0])


@pytest.mark.parametrize("synchrony", ["sync", "async"])
def test_servers_have_cpus_of_their_own(
    folder: Path, tmp_path: Path, launcher: HostsLauncher, synchrony: str
) -> None:
    from ray.util.placement_group import placement_group_table

    reserved: list[list[float]] = []

    def look(run: HostsRun, _: list[Event]) -> None:
        if run.sentinels and not reserved:
            groups = placement_group_table().values()
            bundles = [group["bundles"] for group in groups if group["state"] == "CREATED"]
            reserved.extend([each["CPU"] for _, each in sorted(found.items())] for found in bundles)

    events = train(launcher, on_two_hosts(folder, synchrony), tmp_path / "run", look)
    assert isinstance(events[-1], TrainingEvent), events[-1]
    assert reserved == [[3.0, 2.0]]
    if synchrony == "sync":
        job = on_two_hosts(folder, synchrony).job
        local = train_on_servers(a_task(job, folder / "log", "dp+servers3", 2), tmp_path / "local")
        assert Served(events, {}).ne == pytest.approx(local.ne, abs=1e-5)


def test_a_node_with_servers_is_lost_and_the_next_attempt_goes_on(
    folder: Path, tmp_path: Path, cluster: Any, launcher: HostsLauncher, said: list[str]
) -> None:
    out = tmp_path / "run"
    checkpoints = out / "checkpoints"
    kept = {"resume_from": str(checkpoints), "checkpoint_seconds": 0.0}
    task = on_two_hosts(folder, "sync", training=LONG, **kept)
    lost: list[Any] = []

    def lose(run: HostsRun, _: list[Event]) -> None:
        if not lost and run.sentinels and checkpoints_in(checkpoints):
            lost.append(sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0])
            cluster.remove_node(lost[0], allow_graceful=False)

    last = train(launcher, task, out, lose)[-1]
    assert isinstance(last, FailureEvent)
    assert last.host_left
    assert f"node 127.0.0.1 ({lost[0].node_id[:8]}) has left" in last.error

    def add(run: HostsRun, _: list[Event]) -> None:
        if len(cluster.worker_nodes) < 2 and "waiting for" in said[-1]:
            add_node(cluster, CPUS)

    events = train(launcher, task.replace(attempt=1), out, add)
    assert isinstance(events[-1], TrainingEvent), events[-1]
    assert any(
        sentence.startswith(
            "waiting for 2 node(s) with 1 CPU(s) each, with 1 CPU(s) more for each of 3 server(s) of tables"
        )
        for sentence in said
    )
    for name in ("rank0", "rank1"):
        assert "goes on from" in (out / f"attempt1.{name}.log").read_text()


@pytest.mark.parametrize("name", ["rank1", "server1"])
def test_what_is_killed_is_replaced_on_its_host(
    folder: Path, tmp_path: Path, launcher: HostsLauncher, name: str
) -> None:
    out = tmp_path / "run"
    checkpoints = out / "checkpoints"
    killed: list[int] = []

    def kill(run: HostsRun, events: list[Event]) -> None:
        if not killed and checkpoints_in(checkpoints) and events[-1:] and events[-1].event == "progress":
            killed.append(process_of(out, name))
            os.kill(killed[0], signal.SIGKILL)

    kept = {"resume_from": str(checkpoints), "checkpoint_seconds": 0.0, "progress_seconds": 0.02}
    events = train(launcher, on_two_hosts(folder, "async", training=LONG, **kept), out, kill)
    (replaced,) = [event for event in events if isinstance(event, ReplacementEvent)]
    assert replaced.process == f"{name[:-1]} {name[-1]}"
    assert replaced.how == "was killed by signal 9 (SIGKILL)"
    assert isinstance(events[-1], TrainingEvent), events[-1]
    if name == "rank1":
        assert events[-1].measured.lost_steps in (None, 1)  # the batch that it had, if it had one
    again = process_of(out, name)
    assert again != killed[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in (again, process_of(out, "rank0")))


def test_a_cluster_without_room_for_servers(hosts: Hosts) -> None:
    hosts.check(shape(2, 1, 1, 4))
    with pytest.raises(
        UserError, match=r"more for each of 5 server.*and 1 of the cluster's can.*fewer servers="
    ):
        hosts.check(shape(2, 1, 1, 5))


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_what_is_reserved_is_what_is_started(hosts: int, servers: int) -> None:
    task = Task.model_construct(
        hosts=hosts, gpus_per_host=2, threads=3, address="10.0.0.1:1", strategy=Strategy(servers=servers)
    )
    wanted = shape(hosts, 2, 3, servers)
    assert [wanted.cpus_of(host) for host in range(hosts)] == [
        3 * len(task.processes_of(host)) for host in range(hosts)
    ]
