"""How soon a training against servers goes on after one of its processes was killed, and what was lost.

A process is killed at a random moment; the time is counted until another has taken its place and the first rank
tells of more examples than before. Where the attempt ends with it, the next one is started at once, and the time
is until it is as far again.

    OMP_NUM_THREADS=1 python -m benchmarks.servers.recovery [--rows 40000] [--kills 10]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers.watched_training import served_job, served_task, watched
from benchmarks.shared.machine_and_tables import machine, markdown
from search.dataset import open_log
from search.log_config import LogConfig
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event, FailureEvent, Progress, ReplacementEvent, TrainingEvent
from trials.records.job import Synchrony, TablesConfig, TrainingConfig
from trials.records.places import checkpoints_in
from trials.records.strategy import Strategy
from trials.runtime.launcher import Launcher, Run

RANKS, SERVERS, PASSES = 2, 2, 50
ROLES = {"first rank": (0,), "other rank": (1,), "server": (2, 3)}
WAYS: tuple[Synchrony, ...] = ("async", "semi", "sync")
MOST_STEPS = 40
"""Number of progress events after which the next process is killed, at most."""


class Recovered(NamedTuple):
    """What came after the death of a process."""

    seconds: float
    goes_on: bool
    """Whether the others went on, and another took its place."""


class Killer:
    """Kills one of some processes again and again, and takes the time until there is progress."""

    def __init__(self, folder: Path, processes: Sequence[int], kills: int) -> None:
        self._folder, self._processes, self._left = folder, processes, kills
        self._random = random.Random(0)
        self._wait, self._examples = 3, 0
        self._killed_at: float | None = None
        self._is_known = self._goes_on = False
        self.recovered, self.lost_steps = list[Recovered](), 0

    def __call__(self, run: Run, said: list[Event]) -> bool:
        for event in said:
            if isinstance(
                event, (ReplacementEvent, FailureEvent)
            ):  # steps that were under way before say nothing
                self._is_known, self._goes_on = True, isinstance(event, ReplacementEvent)
            if isinstance(event, Progress):
                self.lost_steps = event.lost_steps or self.lost_steps
                self._note(event)
        if self._killed_at is None and self._wait <= 0:
            if not self._left:
                return True
            if checkpoints_in(self._folder / "checkpoints"):
                process = run._processes[self._random.choice(self._processes)]
                os.kill(process._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                self._killed_at, self._is_known = time.monotonic(), False
                self._left -= 1
        return False

    def _note(self, event: Progress) -> None:
        if self._killed_at is None or not self._is_known:
            self._wait -= self._killed_at is None
            self._examples = event.examples
        elif event.examples > self._examples:
            self.recovered.append(Recovered(time.monotonic() - self._killed_at, self._goes_on))
            self._killed_at, self._wait = None, self._random.randrange(3, MOST_STEPS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the demo log")
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args(arguments)
    log = open_log(LogConfig.model_validate({"data": ("demo",), "demo": {"rows": options.rows}}))
    print(f"{machine()}; {RANKS} ranks, {SERVERS} servers, {options.kills} kills each\n")
    rows, launcher = [], Launcher()
    for synchrony in WAYS:
        for role, processes in ROLES.items():
            recovered, lost = _recovered(launcher, log, synchrony, processes, options.kills)
            seconds = [one.seconds for one in recovered]
            rows.append(
                (
                    synchrony,
                    role,
                    "go on" if all(one.goes_on for one in recovered) else "go back to the checkpoint",
                    f"{statistics.median(seconds):.2f} ({max(seconds):.2f})",
                    f"{lost / options.kills:.1f}",
                )
            )
    header = ("synchrony", "killed", "the others", "s until there is progress (most)", "steps lost, each")
    print(markdown(header, rows))


def _recovered(
    launcher: Launcher, log: PreparedLog, synchrony: Synchrony, processes: Sequence[int], kills: int
) -> tuple[list[Recovered], int]:
    """What came after each kill, and the number of steps whose updates were lost."""
    training = TrainingConfig(epochs=PASSES, batch_size=256, patience=999, evaluate_every=4096)
    job = served_job(log, "light", TablesConfig(synchrony=synchrony), training)
    task = served_task(log, job, Strategy(servers=SERVERS), RANKS).replace(
        progress_seconds=0.01, checkpoint_seconds=0.0
    )
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), processes, kills)
        task = task.replace(resume_from=f"{folder}/checkpoints")
        while len(killer.recovered) < kills:
            events = watched(launcher, task, Path(folder), killer, seconds=0.005)
            if any(isinstance(event, TrainingEvent) for event in events):
                break
    return killer.recovered, killer.lost_steps


if __name__ == "__main__":
    main()
