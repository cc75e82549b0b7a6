"""What a slow rank costs the others, in each of the three ways to keep ranks together against servers.

One rank is stopped and continued in turn, at random, so that it has a share of its time. Examples per second are
of all ranks together, in pairs of an undisturbed training and one with the slow rank: if nobody waited for it,
they would be (ranks - 1 + share) / ranks of the undisturbed ones. On a machine with fewer cores than processes the
others also gain what the slow one leaves.

    OMP_NUM_THREADS=1 python -m benchmarks.servers.slow_rank [--rows 40000] [--ranks 2] [--share 0.5] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers.watched_training import DENSE, served_job, served_task, watched
from benchmarks.shared.machine_and_tables import machine, markdown
from search.dataset import open_log
from search.log_config import LogConfig
from trials.records.events import Event, TrainingEvent
from trials.records.job import TablesConfig, TrainingConfig
from trials.records.strategy import Strategy
from trials.records.task import Task
from trials.runtime.launcher import Launcher, Run

WAYS = {
    "async": TablesConfig(synchrony="async"),
    "semi, staleness 2": TablesConfig(synchrony="semi", staleness=2),
    "sync": TablesConfig(synchrony="sync"),
}
TURN_SECONDS = 0.03, 0.09
"""Shortest and longest time after which the slow rank is stopped, or continued."""


class SlowRank:
    """Stops the last rank for a part of its time, from its first progress on."""

    def __init__(self, rank: int, share: float) -> None:
        self._rank, self._share = rank, share
        self._pid: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._slow_down, daemon=True)

    def __call__(self, run: Run, said: list[Event]) -> bool:
        if self._pid is None and any(event.event == "progress" for event in said):
            self._pid = run._processes[self._rank]._process.pid  # type: ignore[attr-defined]
            self._thread.start()
        if any(isinstance(event, TrainingEvent) for event in said):
            self._over.set()
        return False

    def _slow_down(self) -> None:
        drawn, pid = random.Random(0), self._pid
        assert pid is not None
        while not self._over.is_set():
            try:
                os.kill(pid, signal.SIGSTOP)
                self._over.wait(drawn.uniform(*TURN_SECONDS) * 2 * (1 - self._share))
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            self._over.wait(drawn.uniform(*TURN_SECONDS) * 2 * self._share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the demo log")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5, help="of its time that the slow rank has")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dense", nargs="+", choices=DENSE, default=list(DENSE))
    options = parser.parse_args(arguments)
    log = open_log(LogConfig.model_validate({"data": ("demo",), "demo": {"rows": options.rows}}))
    print(f"{machine()}; {options.ranks} ranks, the last with {options.share:.0%} of its time, one server\n")
    rows, launcher = [], Launcher()
    for dense in options.dense:
        for way, tables in WAYS.items():
            job = served_job(log, dense, tables, TrainingConfig(epochs=2, batch_size=256, patience=99))
            task = served_task(log, job, Strategy(servers=1), options.ranks)
            pairs = [_pair(launcher, task, options.share) for _ in range(options.repeats)]
            ratios = [slowed / alone for alone, slowed in pairs]
            rows.append(
                (
                    dense,
                    way,
                    f"{statistics.median(alone for alone, _ in pairs):,.0f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                )
            )
    print(markdown(("dense part", "tables", "examples/s", "with the slow rank"), rows))


def _pair(launcher: Launcher, task: Task, share: float) -> tuple[float, float]:
    """Examples per second undisturbed, and with a slow rank."""
    found = []
    for look in (None, SlowRank(task.gpus_per_host - 1, share)):
        with tempfile.TemporaryDirectory() as folder:
            events = watched(launcher, task, Path(folder), look, seconds=0.01)
        trained = next(event for event in events if isinstance(event, TrainingEvent))
        assert trained.measured.examples_per_second is not None
        found.append(trained.measured.examples_per_second)
    return found[0], found[1]


if __name__ == "__main__":
    main()
