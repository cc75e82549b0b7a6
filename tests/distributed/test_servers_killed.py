"""Ranks and servers of tables that are killed at random moments: what goes on, what comes back, what is lost."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import write_log
from servers.served_training import a_job, a_task, failure, train_on_servers

from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import GivenGrowing, ReadOptions
from trials.records.events import Event, Progress, ReplacementEvent
from trials.records.places import checkpoints_in
from trials.records.task import Task
from trials.runtime.launcher import Run

pytestmark = pytest.mark.usefixtures("one_thread")
SLOWLY = {"learning_rate": 5e-5, "embedding_learning_rate": 1e-3}
LONG = SLOWLY | {"epochs": 5, "patience": 999, "evaluate_every": 1200}
SHORTER = LONG | {"epochs": 3}
"""Long enough for two kills, and for one."""
EVALUATIONS = 3 * 2
"""Of the shorter one."""
NAMES = ("rank 0", "rank 1", "rank 2", "server 0", "server 1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    growing = GivenGrowing(capacity=200, columns=("user", "tags"), admit_after=2)
    prepare([write_log(folder / "log.csv", 3010)], out=folder / "log", options=ReadOptions(growing=growing))
    return folder


def long_task(folder: Path, synchrony: str, out: Path, training: dict[str, float] = LONG) -> Task:
    """A training of three ranks and two servers, with a checkpoint after each evaluation."""
    log, kept = folder / "log", {"resume_from": str(out / "checkpoints"), "checkpoint_seconds": 0.0}
    job = a_job(PreparedLog.open(log), {"synchrony": synchrony}, **training)
    return a_task(job, log, "dp+servers2", 3, progress_seconds=0.02, **kept)


class Killer:
    """Sends a signal to one of some processes, again and again, after random numbers of progress events."""

    def __init__(self, out: Path, processes: Sequence[int], most: int, sent: int = signal.SIGKILL) -> None:
        self._out, self._processes, self._most, self._signal = out, processes, most, sent
        self._random = random.Random(0)
        self._next, self.killed, self.seen = 3, list[int](), set[int]()

    def __call__(self, run: Run, events: Sequence[Event]) -> None:
        pids = {number: rank._process.pid for number, rank in run._processes.items()}  # type: ignore[attr-defined]
        self.seen.update(pids.values())
        progress = sum(isinstance(event, Progress) for event in events)
        back = sum(isinstance(event, ReplacementEvent) for event in events) == len(self.killed)
        saved = bool(checkpoints_in(self._out / "checkpoints"))
        if len(self.killed) == self._most or progress < self._next or not (back and saved):
            return
        process = self._random.choice(self._processes)
        os.kill(pids[process], self._signal)
        self.killed.append(process)
        self._next = progress + self._random.randrange(3, 12)


@pytest.mark.parametrize(("synchrony", "processes"), [("async", (1, 2)), ("async", (3, 4)), ("semi", (3, 4))])
def test_the_others_go_on_and_another_takes_its_place(
    folder: Path, tmp_path: Path, synchrony: str, processes: Sequence[int]
) -> None:
    kills = 2
    killer = Killer(tmp_path, processes, kills)
    served = train_on_servers(long_task(folder, synchrony, tmp_path), tmp_path, killer)
    replaced = [event for event in served.events if isinstance(event, ReplacementEvent)]
    assert [event.process for event in replaced] == [NAMES[number] for number in killer.killed]
    assert len(replaced) == kills
    assert all(event.how == "was killed by signal 9 (SIGKILL)" for event in replaced)
    assert all(map(math.isfinite, served.ne))
    lost = served.trained.measured.lost_steps or 0
    assert lost > kills if 3 in processes else lost <= kills  # of a rank, the batch that it had
    assert len(killer.seen) == len(NAMES) + kills
    assert not any(Path(f"/proc/{pid}").exists() for pid in killer.seen)


def test_a_rank_on_its_own_that_is_stopped_is_replaced(folder: Path, tmp_path: Path) -> None:
    task = long_task(folder, "async", tmp_path, SHORTER)
    served = train_on_servers(task, tmp_path, Killer(tmp_path, [1], 1, signal.SIGSTOP))
    (replaced,) = [event for event in served.events if isinstance(event, ReplacementEvent)]
    assert replaced.words.startswith("rank 1 was stopped by a signal, and was ended after")
    assert len(served.ne) == EVALUATIONS


@pytest.mark.parametrize(("synchrony", "process"), [("sync", 2), ("async", 0)])
def test_all_go_back_to_the_newest_checkpoint_and_nothing_is_lost(
    folder: Path, tmp_path: Path, synchrony: str, process: int
) -> None:
    task = long_task(folder, synchrony, tmp_path, SHORTER)
    broken = train_on_servers(task, tmp_path, Killer(tmp_path, [process], 1))
    assert f"{NAMES[process]} was killed by signal 9 (SIGKILL) after" in failure(broken)
    served = train_on_servers(task.replace(attempt=1), tmp_path)
    assert served.trained.measured.lost_steps is None
    assert len(served.ne) == EVALUATIONS
    if synchrony == "sync":
        whole = long_task(folder, synchrony, tmp_path / "whole", SHORTER)
        undisturbed = train_on_servers(whole, tmp_path / "whole")
        assert served.ne == pytest.approx(undisturbed.ne, abs=1e-6)
