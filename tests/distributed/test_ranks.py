"""Real processes: ranks that start together, and end together however one of them goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import free_port
from faulty_ranks import (
    BAD_RANK,
    RANKS,
    RANKS_PER_HOST,
    all_gone,
    everything,
    fork_server,
    pids,
    start,
    trained,
    wait_until_it_misbehaves,
)

from trials.records.events import RENDEZVOUS, FailureEvent, Progress, last_words
from trials.runtime.launcher import Launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(several_ranks=True)


def test_ranks_start_end_and_leave_nothing_to_the_next(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "50 % of #1 + é"
    seen: set[int] = set()
    for attempt, fault in enumerate(("", "raise", "")):  # a failure between two that go well, in one folder
        events = everything(start(launcher, folder, fault, attempt=attempt))
        found = pids(folder)
        assert all_gone(found)
        assert not (folder / RENDEZVOUS).exists()
        assert seen.isdisjoint(found)
        seen |= set(found)
        if not fault:
            assert events[-1] == trained()
            assert [event.examples for event in events if isinstance(event, Progress)] == [*range(1, 11)]
            assert not any((folder / last_words(rank)).exists() for rank in range(RANKS))
        for rank in range(RANKS):
            log = (folder / f"attempt{attempt}.rank{rank}.log").read_text()
            assert log.count(f"rank {rank} begins") == 1
            assert f"INFO rank {rank} trials.runtime.worker: attempt{attempt}: strategy dp" in log
            assert ("ValueError: a fault of its own" in log) == (fault == "raise" and rank == BAD_RANK)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", f"rank {BAD_RANK} failed after 3 of 10 examples: ValueError: a fault of its own"),
        ("out of memory", f"rank {BAD_RANK} failed"),
        ("exit", f"rank {BAD_RANK} ended without a result (exit code 3)"),
        ("SIGSEGV", f"rank {BAD_RANK} was killed by signal 11 (SIGSEGV)"),
        ("SIGKILL", f"rank {BAD_RANK} was killed by signal 9 (SIGKILL)"),
    ],
)
def test_one_that_fails_ends_all(launcher: Launcher, tmp_path: Path, fault: str, words: str) -> None:
    folder = tmp_path / "trial"
    *events, last = everything(start(launcher, folder, fault))
    assert all(isinstance(event, Progress) for event in events)
    assert isinstance(last, FailureEvent)
    assert words in last.error
    assert (f"attempt0.rank{BAD_RANK}.log ends:" in last.error) == (fault != "out of memory")
    assert last.out_of_memory == (fault == "out of memory")
    assert last.killed == (fault == "SIGKILL")
    if fault == "out of memory":
        assert (last.needed_bytes, last.limit_bytes) == (300, 200)
    assert all_gone(pids(folder))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("SIGSTOP", f"rank {BAD_RANK} stopped", marks=pytest.mark.slow),
        ("sleep", f"rank {BAD_RANK} waiting in misbehave (faulty_ranks"),
    ],
)
def test_one_that_hangs_ends_all_at_the_deadline(
    launcher: Launcher, tmp_path: Path, fault: str, words: str
) -> None:
    folder = tmp_path / "trial"
    run = start(launcher, folder, fault, deadline_seconds=3)
    wait_until_it_misbehaves(folder)
    last = everything(run)[-1]
    assert isinstance(last, FailureEvent)
    assert not last.out_of_memory
    assert last.stopped == (fault == "SIGSTOP")
    assert last.error.startswith("no progress for ")
    assert words in last.error
    assert "all_reduce" in last.error or "distributed" in last.error  # where the others wait
    assert all_gone(pids(folder))


def test_a_rank_killed_from_outside_is_named(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    run = start(launcher, folder, steps=ENDLESS)
    found = pids(folder)
    os.kill(found[1], signal.SIGKILL)
    last = everything(run)[-1]
    assert isinstance(last, FailureEvent)
    assert "rank 1 was killed by signal 9 (SIGKILL)" in last.error
    assert all_gone(found)


def test_no_process_outlives_its_driver_nor_does_one_that_is_stopped(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", f"import faulty_ranks; faulty_ranks.drive({str(tmp_path)!r})"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    found = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(found) == RANKS + 1
    os.kill(found[1], signal.SIGSTOP)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert all_gone(found)


def test_a_killed_fork_server_ends_its_ranks_and_is_replaced_also_while_it_starts_some(
    launcher: Launcher, tmp_path: Path
) -> None:
    run = start(launcher, tmp_path / "a", steps=ENDLESS)
    found = pids(tmp_path / "a")
    os.kill(fork_server(), signal.SIGKILL)
    last = everything(run)[-1]
    assert isinstance(last, FailureEvent)
    assert "the fork server" in last.error
    assert last.killed
    assert all_gone(found)
    assert everything(start(launcher, tmp_path / "b"))[-1] == trained()
    os.kill(fork_server(), signal.SIGSTOP)  # a start waits for it, as for one that still imports
    threading.Timer(0.5, os.kill, (fork_server(), signal.SIGKILL)).start()
    assert everything(start(launcher, tmp_path / "c"))[-1] == trained()


def test_hosts_meet_at_an_address(launcher: Launcher, tmp_path: Path) -> None:
    """Each host starts its own ranks, in a folder of its own; only the first tells how it went."""
    address = f"127.0.0.1:{free_port()}"
    runs = [start(launcher, tmp_path / str(host), address=address, host=host) for host in range(2)]
    assert everything(runs[0])[-1] == trained()
    assert everything(runs[1]) == []
    assert {int(path.stem) for path in (tmp_path / "1").glob("*.pid")} == {*range(RANKS_PER_HOST, RANKS)}
    assert not (tmp_path / "1" / RENDEZVOUS).exists()


def test_a_host_that_loses_its_peers_ends(launcher: Launcher, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    runs = [start(launcher, tmp_path / str(host), "SIGKILL", address=address, host=host) for host in range(2)]
    first, second = everything(runs[0])[-1], everything(runs[1])[-1]
    assert isinstance(first, FailureEvent)
    assert isinstance(second, FailureEvent)
    assert f"rank {BAD_RANK} was killed by signal 9" in second.error
    assert "rank 0 failed" in first.error or "rank 1 failed" in first.error
