"""Hosts of a real Ray cluster, all on this machine: studies on them through the command line, then single runs
and how they end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    EARLY_CHECKPOINTS_CODE,
    SMALL,
    TIMEOUT_SECONDS,
    run_process,
    start,
    wait_for_trials,
)
from faulty_hosts import ENDLESS, ENVIRONMENT, GPUS, MARKS, FaultyLauncher, add_node, ray_cluster
from faulty_ranks import (
    BAD_RANK,
    HOSTS,
    RANKS,
    RANKS_PER_HOST,
    all_gone,
    everything,
    pids,
    real_training,
    task,
    trained,
    wait_until_it_misbehaves,
)
from servers.web_site import web_site
from tools import needs

from dhen.errors import UserError
from search.config import read_study_config
from search.read_study import read_study
from trials.data.prepared_log import PreparedLog
from trials.records.events import START_MARK, FailureEvent
from trials.records.trial_record import Outcome
from trials.runtime.hosts.agent import StudyNeeds
from trials.runtime.hosts.hosts import MARK, NO_TOKEN, WITHOUT_TOKEN, Hosts, Node
from trials.runtime.hosts.placement import Shape, part_of_a_device
from trials.runtime.hosts.ray_connection import Head, connected
from trials.runtime.hosts.run import HostsLauncher, HostsRun

pytestmark = [*MARKS, needs("ray")]
FAULTS = {
    "raise": f"rank {BAD_RANK} failed after 3 of 10 examples: ValueError: a fault of its own",
    "SIGKILL": f"rank {BAD_RANK} was killed by signal 9",
    "SIGSTOP": f"rank {BAD_RANK} stopped",
}
FEW = ("ranks=2x1", "launcher=ray")
LONG = ("training.epochs=8", "parallel=null")
"""Trainings with many evaluations, as many at once as the nodes hold."""
WANTED = Shape(HOSTS, float(RANKS_PER_HOST), 0.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster() as started:
        yield started


@pytest.fixture
def on_ray(cluster: Any, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a study that finds the cluster."""
    return environment | {name: os.environ[name] for name in (*ENVIRONMENT, "RAY_ADDRESS")}


def test_a_node_is_lost_and_its_candidate_goes_on_elsewhere(
    cluster: Any, on_ray: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    driver = start(click_log, out, on_ray, "trials=1", *FEW, *LONG, code=EARLY_CHECKPOINTS_CODE)
    folder = out / "trials" / "00001"
    training = folder / "attempt0.rank0.log"
    wait_for(lambda: training.exists() and "written in" in training.read_text(), driver)
    os.kill(rank_of(folder, 1), signal.SIGSTOP)  # it shall not have ended before its node has
    leaving = next(iter(cluster.worker_nodes))
    cluster.remove_node(leaving, allow_graceful=False)
    add_node(cluster)
    said, errors = driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 0, errors
    words = f"node 127.0.0.1 ({leaving.node_id[:8]})"
    assert f"{words} takes part" in said
    assert f"{words} has left" in said
    assert said.count("takes part") == 3
    # each node has two CPUs, and a candidate takes one of both
    assert "up to 2 candidates train at once on the cluster's nodes, with 1 thread(s) per rank" in said
    first, second = read_study(out).trials[1].attempts[:2]
    assert first.outcome is Outcome.INTERRUPTED
    assert words in str(first.error)
    assert second.outcome is Outcome.COMPLETED
    assert "goes on from" in (folder / "attempt1.rank0.log").read_text()
    assert f"INFO trials.runtime.hosts.hosts: {words} takes part" in (out / "driver.log").read_text()


@pytest.mark.slow
def test_a_log_at_a_url_is_copied_once_by_each_host(
    cluster: Any, on_ray: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    with web_site(tmp_path / "site") as site:
        shutil.copy(click_log, site.folder / "clicks.csv")
        for times, name in enumerate(("first", "second")):
            out, words = tmp_path / name, ("--data", f"{site.address}/clicks.csv", "trials=1", *FEW)
            done = run_process(("run", "--out", out, *words, *SMALL), on_ray, None)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("gets the log") == done.stdout.count("takes part") > 1, times
            logs = [out / "trials" / "00001" / f"attempt0.rank{rank}.log" for rank in range(2)]
            assert all(f"log: {cluster.folder}/cache" in file.read_text() for file in logs)
        hosts = done.stdout.count("takes part")
    assert site.copies() == 1 + hosts
    cache = Path(on_ray["DHEN_SEARCH_CACHE"])
    (log,) = {read_study(tmp_path / name).log.fingerprint for name in ("first", "second")}
    prepared = [
        PreparedLog.open(manifest.parent).fingerprint
        for folder in (cache, *cluster.folder.glob("cache*"))
        for manifest in folder.glob("*/manifest.json")
    ]
    assert prepared.count(log) >= 1 + hosts


def test_nothing_is_left_of_a_study_that_is_killed(
    cluster: Any, on_ray: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    driver = start(click_log, out, on_ray, "trials=99", *FEW, "training.epochs=40")
    wait_for_trials(out, 0)
    logs = [out / "trials" / "00000" / f"attempt0.rank{rank}.log" for rank in range(2)]
    wait_for(lambda: all(log.exists() and START_MARK in log.read_text() for log in logs), driver)
    ranks = [int(log.read_text().rpartition(f"{START_MARK}process ")[2].partition(",")[0]) for log in logs]
    processes = {*ranks, *map(parent_of, ranks), *(parent_of(parent_of(rank)) for rank in ranks)}
    assert len(processes) == 6  # each rank has its fork server, and that its agent
    driver.kill()
    driver.communicate(timeout=TIMEOUT_SECONDS)
    assert all_gone([*processes], 20.0)


@pytest.mark.slow
def test_a_study_of_a_client_of_the_cluster(
    cluster: Any, on_ray: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    address = f"launcher=ray://127.0.0.1:{cluster.client_port}"
    driver = start(click_log, tmp_path / "study", on_ray, "trials=1", "ranks=2x1", address)
    _, errors = driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 0, errors
    assert [trial.result.outcome for trial in read_study(tmp_path / "study").trials] == [
        Outcome.COMPLETED
    ] * 2


def test_another_token_is_no_token(on_ray: dict[str, str], click_log: Path, tmp_path: Path) -> None:
    words = ("run", "--data", click_log, "--out", tmp_path / "study", "trials=1", "launcher=ray")
    said = run_process(words, on_ray | {"RAY_AUTH_TOKEN": "f" * 32}, None)
    assert said.returncode == 2, said.stderr
    assert "the same token must be here too" in said.stderr.splitlines()[-1]
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("launcher", "address", "says"),
    [
        ("ray", "127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 (Connection refused); start one with"),
        ("ray", "nowhere", "no Ray cluster answers at nowhere (expected host:port"),
        ("ray://127.0.0.1:1", "", "no Ray cluster answers at ray://127.0.0.1:1 (Connection refused)"),
    ],
)
def test_places_without_a_cluster(
    launcher: str, address: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=re.escape(says)), connected(launcher):
        pass


def test_launchers_that_are_none() -> None:
    for name, says in {"rey": "expected local, ray", "ray://here": "expected host:port"}.items():
        with pytest.raises(UserError, match=says):
            read_study_config(None, (f"launcher={name}",))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'dhen-search\[ray\]'"), connected("ray"):
        pass


@pytest.fixture(scope="module")
def head(cluster: Any) -> Iterator[Head]:
    with connected("ray") as connected_to:
        yield connected_to


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    return PreparedLog.open(Path(real_training(tmp_path_factory.mktemp("log") / "log", 300).log_directory))


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def hosts(head: Head, log: PreparedLog, directory: Path, said: list[str]) -> Iterator[Hosts]:
    with closing(Hosts(head, said.append, FaultyLauncher)) as opened:
        opened.open(log, directory)
        assert (directory / MARK).exists()
        yield opened
    assert not (directory / MARK).exists()


@pytest.fixture(scope="module")
def launcher(hosts: Hosts) -> HostsLauncher:
    return HostsLauncher(hosts)


def started(launcher: HostsLauncher, folder: Path, **changes: object) -> HostsRun:
    folder.mkdir()
    return launcher.start(task(**changes), folder)


def test_runs_go_well_and_end_badly_on_all_hosts(
    tmp_path: Path, launcher: HostsLauncher, said: list[str]
) -> None:
    assert sum("takes part" in sentence for sentence in said) == HOSTS
    assert everything(started(launcher, tmp_path / "good"))[-1] == trained()
    for fault, words in FAULTS.items():
        hangs = fault == "SIGSTOP"
        run = started(launcher, tmp_path / fault, deadline_seconds=4 if hangs else None)
        if hangs:
            begun(run, tmp_path / fault)
            wait_until_it_misbehaves(tmp_path / fault)
        last = everything(run)[-1]
        assert isinstance(last, FailureEvent)
        assert words in last.error
        assert f"attempt0.rank{BAD_RANK}.log ends:" in last.error
        assert last.killed == (fault == "SIGKILL")
        found = [*(tmp_path / fault).glob("*.pid")]
        assert len(found) == RANKS
        assert all_gone([int(file.read_text()) for file in found])
    beside = [started(launcher, tmp_path / name) for name in "ab"]  # each takes all CPUs: the second waits
    assert [everything(run)[-1] for run in beside] == [trained(), trained()]


def test_too_few_nodes_and_nodes_that_are_too_small(hosts: Hosts) -> None:
    hosts.check(WANTED)
    with pytest.raises(
        UserError, match=r"needs 3 node\(s\) with 1 CPU\(s\) each, and 2 of the cluster's can"
    ):
        hosts.check(Shape(3, 1.0, 0.0))
    with pytest.raises(UserError, match=r"and 0 of the cluster's can train: .*has 2 CPU\(s\) and 3 GPU\(s\)"):
        hosts.check(Shape(2, 3.0, 0.0))


def test_what_a_node_may_have_that_shuts_it_out(
    hosts: Hosts, log: PreparedLog, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = hosts.ready()[0]
    facts = member.facts
    assert facts is not None
    assert facts.asks_for_token
    assert hosts.objection(facts) is None
    versions = facts.versions | {"torch": "1.0"}
    assert "torch is 1.0 there and" in str(hosts.objection(facts._replace(versions=versions)))
    assert "CUDA devices" in str(hosts.objection(facts._replace(devices=2)))
    open_to_all = facts._replace(asks_for_token=False)
    assert hosts.objection(open_to_all) is None  # at 127.0.0.1
    reached = Node("a", "10.0.0.1", 1.0, 0.0)
    monkeypatch.setattr("trials.runtime.hosts.hosts.nodes_alive", lambda: [reached])
    assert hosts.objection(open_to_all) == NO_TOKEN
    with monkeypatch.context() as accepted:
        accepted.setenv(WITHOUT_TOKEN, "1")
        assert hosts.objection(open_to_all) is None
    assert f"{WITHOUT_TOKEN}=1" in NO_TOKEN
    assert hosts.objection(facts) is None

    import ray

    study = StudyNeeds(
        str(log.directory), log.fingerprint, None, str(directory / MARK), (directory / MARK).read_text()
    )
    for changes, says in (
        ({"log_directory": str(tmp_path / "none")}, "none"),
        ({"log": "another"}, "holds another log there"),
        ({"mark_text": "another"}, "is not the study's directory there"),
        ({"mark": str(tmp_path / MARK)}, "is not the study's directory there"),
    ):
        said = ray.get(member.agent.facts.remote(study._replace(**changes))).objection
        assert says in said
        assert "at the same paths, on a file system that they share" in said
    changed = study._replace(log="another", get_log=partial(PreparedLog.open, log.directory))
    assert ray.get(member.agent.facts.remote(changed)).objection is None
    assert "not the log that the study began with" in ray.get(member.agent.get_log.remote(changed))
    gone = study._replace(get_log=partial(PreparedLog.open, tmp_path))
    assert "not a prepared log" in ray.get(member.agent.get_log.remote(gone))


def test_a_run_ends_everywhere_when_told(tmp_path: Path, launcher: HostsLauncher) -> None:
    run = started(launcher, tmp_path / ENDLESS)
    found = begun(run, tmp_path / ENDLESS)
    run.kill()
    assert all_gone(found)
    # a scheduler that has stopped a candidate does not ask for its events any more
    assert everything(started(launcher, tmp_path / "next"))[-1] == trained()
    given_up = started(launcher, tmp_path / "never")
    given_up.kill()
    assert everything(given_up) is not None
    assert given_up.ended


def test_two_candidates_of_one_host_each_train_at_once(tmp_path: Path, launcher: HostsLauncher) -> None:
    folders = [tmp_path / name / ENDLESS for name in "ab"]
    for folder in folders:
        folder.parent.mkdir()
    runs = [started(launcher, folder, hosts=1) for folder in folders]
    found = [begun(run, folder, RANKS_PER_HOST) for run, folder in zip(runs, folders, strict=True)]
    agents = [{parent_of(parent_of(rank)) for rank in ranks} for ranks in found]
    assert len(agents[0] | agents[1]) == HOSTS
    for run in runs:
        run.kill()
        everything(run)
    assert all_gone([*found[0], *found[1]])


def test_a_node_that_leaves_ends_the_run_and_one_that_comes_is_used(
    tmp_path: Path, cluster: Any, launcher: HostsLauncher, said: list[str]
) -> None:
    run = started(launcher, tmp_path / ENDLESS)
    found = begun(run, tmp_path / ENDLESS)
    leaving = sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0]
    cluster.remove_node(leaving, allow_graceful=False)
    last = everything(run)[-1]
    assert isinstance(last, FailureEvent)
    assert last.killed
    assert f"node 127.0.0.1 ({leaving.node_id[:8]}) has left" in last.error
    assert all_gone(found)

    again = started(launcher, tmp_path / "again")
    assert not again.ended
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not said[-1].startswith("waiting for 2 node(s) with 2 CPU(s) each: 1 node(s) take part"):
        assert time.monotonic() < deadline, said
        assert again.new_events() == []
        time.sleep(0.05)
    add_node(cluster)
    assert everything(again)[-1] == trained()


def test_devices_of_a_reservation_are_its_own(hosts: Hosts, launcher: HostsLauncher) -> None:
    """Declared ones: there are none here."""
    nodes = {member.node.id for member in hosts.ready()}
    reservations = launcher.reservations
    first, second = (reservations.ask(Shape(HOSTS, 0.5, float(gpus)), nodes) for gpus in (2, 1))
    deadline = time.monotonic() + 60
    while (places := first.places()) is None or (others := second.places()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {place.node for place in places} == {place.node for place in others} == nodes
    for place in places:
        beside = next(other for other in others if other.node == place.node)
        assert {*place.devices, *beside.devices} == set("012")
    third = reservations.ask(Shape(HOSTS, 0.5, 1.0), nodes)
    time.sleep(0.5)
    assert third.places() is None  # all devices are reserved
    for reservation in (first, second, third):
        reservation.cancel()


def test_two_candidates_share_a_device(hosts: Hosts, launcher: HostsLauncher) -> None:
    """A declared one."""
    nodes = {member.node.id for member in hosts.ready()}
    wanted = Shape(1, 0.1, part_of_a_device(2))
    all_of_them = 2 * GPUS * len(nodes)
    asked = [launcher.reservations.ask(wanted, nodes) for _ in range(all_of_them + 1)]
    deadline = time.monotonic() + 60
    while len(places := [each for reservation in asked for each in reservation.places() or ()]) < all_of_them:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert set(Counter((place.node, place.devices) for place in places).values()) == {2}
    assert len(places) == all_of_them  # the last one waits
    for reservation in asked:
        reservation.cancel()


def test_a_host_that_does_not_answer_is_given_up(
    tmp_path: Path, hosts: Hosts, launcher: HostsLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of those that share hosts: afterwards there is one less."""
    monkeypatch.setattr("trials.runtime.hosts.hosts.FAREWELL_SECONDS", 1.0)
    run = started(launcher, tmp_path / ENDLESS)
    found = begun(run, tmp_path / ENDLESS)
    agents = {parent_of(parent_of(rank)) for rank in found}
    assert len(agents) == HOSTS
    stopped = agents.pop()
    os.kill(stopped, signal.SIGSTOP)
    run.kill()
    everything(run)
    os.kill(stopped, signal.SIGCONT)
    assert all_gone(found)
    assert len(hosts.ready()) == HOSTS - 1


def begun(run: HostsRun, folder: Path, ranks: int = RANKS) -> list[int]:
    """The ranks, once their hosts are reserved."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not run.sentinels:
        assert time.monotonic() < deadline
        run.new_events()
        time.sleep(0.02)
    return pids(folder, ranks)


def wait_for(there: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not there():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rank_of(folder: Path, rank: int) -> int:
    """Its process, as its log says."""
    log = (folder / f"attempt0.rank{rank}.log").read_text()
    return int(log.rpartition(f"{START_MARK}process ")[2].partition(",")[0])


def parent_of(pid: int) -> int:
    """The parent of a rank is its fork server, whose parent is the agent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
