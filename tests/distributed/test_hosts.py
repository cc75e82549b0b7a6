"""Several hosts, each a process of its own here: runs on all of them, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from faulty_hosts import ENDLESS, FaultyLauncher, first_host, start_joining
from faulty_ranks import BAD_RANK, RANKS, all_gone, everything, pids, real_training, task, trained

from trials.data.cache import PreparedLog
from trials.events import Failed
from trials.hosts.hosts import MARK, Hosts
from trials.hosts.run import HostsLauncher, HostsRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FAULTS = {
    "raise": f"rank {BAD_RANK} failed after 3 of 10 examples: ValueError: a fault of its own",
    "SIGKILL": f"rank {BAD_RANK} was killed by signal 9",
    "SIGSTOP": f"rank {BAD_RANK} stopped",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    return PreparedLog.open(Path(real_training(tmp_path_factory.mktemp("log") / "log", 300).log_directory))


def run_on(hosts: Hosts, folder: Path, **changes: object) -> HostsRun:
    folder.mkdir(exist_ok=True)
    return HostsLauncher(FaultyLauncher(), hosts).start(task(**changes), folder)


@pytest.mark.parametrize(
    "shared", [pytest.param(True, marks=pytest.mark.slow), False], ids=["shared folder", "own folder"]
)
def test_runs_go_well_and_end_badly_on_all_hosts(tmp_path: Path, log: PreparedLog, shared: bool) -> None:
    said: list[str] = []
    hosts = first_host(log, tmp_path, said)
    run = run_on(hosts, tmp_path / "good")
    assert run.new_events() == []
    assert said == [f"waiting for host 1: dhen-search join {hosts.address} --host 1"]
    second = start_joining(hosts.address, None if shared else tmp_path / "elsewhere")
    assert everything(run)[-1] == trained()
    assert said[1:] == ["host 1 (another machine) has joined"]
    for fault, words in FAULTS.items():
        last = everything(run_on(hosts, tmp_path / fault, deadline_seconds=8))[-1]
        assert isinstance(last, Failed)
        assert words in last.error
        assert f"attempt0.rank{BAD_RANK}.log ends:" in last.error
        assert last.killed == (fault == "SIGKILL")
    for fault in FAULTS:
        found = [*(tmp_path / fault).glob("*.pid"), *(tmp_path / "elsewhere" / fault).glob("*.pid")]
        assert len(found) == RANKS
        assert all_gone([int(file.read_text()) for file in found])
        assert (tmp_path / "elsewhere" / fault).exists() != shared
    beside = [run_on(hosts, tmp_path / name) for name in "ab"]
    assert [everything(each)[-1] for each in beside] == [trained(), trained()]
    hosts.close("all trials are done")
    assert second.wait(60) == 0
    assert not (tmp_path / MARK).exists()


def test_a_host_that_leaves_ends_the_run_and_may_come_back(
    tmp_path: Path, log: PreparedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    hosts = first_host(log, tmp_path, said)
    second, folder = start_joining(hosts.address), tmp_path / ENDLESS
    hosts.wait_for_all()
    run = run_on(hosts, folder)
    found = pids(folder)
    second.kill()
    last = everything(run, 30.0)[-1]
    assert isinstance(last, Failed)
    assert last.killed
    assert "host 1 (another machine) left the study" in last.error
    assert all_gone(found, 10.0)
    assert second.wait() == -signal.SIGKILL

    again = run_on(hosts, tmp_path / "again")
    assert not again.ended
    assert said[-1].startswith("waiting for host 1")
    second = start_joining(hosts.address)
    assert everything(again)[-1] == trained()
    _ends_everywhere_when_told(hosts, folder)
    _is_given_up_where_it_does_not_answer(hosts, second.pid, folder, monkeypatch)
    hosts.close("broken off")
    assert second.wait(60) == 1


def _ends_everywhere_when_told(hosts: Hosts, folder: Path) -> None:
    for file in folder.glob("*.pid"):
        file.unlink()
    run = run_on(hosts, folder)
    found, began = pids(folder), time.monotonic()
    run.kill()
    assert time.monotonic() - began < 10
    assert all_gone(found, 1.0)
    everything(run)


def _is_given_up_where_it_does_not_answer(
    hosts: Hosts, pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.hosts.run.FAREWELL_SECONDS", 1.0)
    for file in folder.glob("*.pid"):
        file.unlink()
    run = run_on(hosts, folder)
    found = pids(folder)
    os.kill(pid, signal.SIGSTOP)
    run.kill()
    assert all_gone(found[:2], 1.0)
    everything(run)
    os.kill(pid, signal.SIGCONT)
    assert all_gone(found)
