"""Many drivers of one study on PostgreSQL, with trainings made up: what they reach together, and how it grows.

Each driver is a process with the product's own session (`benchmarks.drivers.one_driver`): sampler, plans, turns,
leases, ledger, report and MLflow are as in any study. Only what a rank would train is made up, in a moment
(`benchmarks.drivers.made_up_training`). Once so many candidates have ended the drivers are interrupted, and the
ledger is looked at: every number is there once, with one outcome and one attempt, and no driver holds anything.

    python -m benchmarks.drivers.many_drivers --storage postgresql://user@host/empty
        [--drivers 8] [--candidates 5000] [--seconds 0] [--sampler auto] [--space default]

The database has to be an empty one, on a server that runs. Columns: candidates per second of all drivers together
since the row before; milliseconds of a driver's CPU per candidate of the study, whoever has trained it, without
the driver that writes the report; milliseconds that a driver spends, per candidate of its own, in transactions
(waits for locks included), and how many those are; in asking the sampler; in planning; in following the others;
memory of the fullest driver that does not write the report, and of the one that does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.drivers.one_driver import PARTS
from benchmarks.shared.machine_and_tables import machine, markdown
from trials.records.trial_record import Outcome
from trials.store.ledger import Ledger
from trials.store.schema import DRIVERS, LEASES

POLL_SECONDS = 1.0
END_SECONDS = 3600.0
"""The report and MLflow are brought up to date at the end."""
ROWS = 2000
STUDY = "many"
BESIDE = ("database", "ask", "plan", "follow others")
"""Parts whose milliseconds per candidate have a column."""


@dataclass(frozen=True)
class Line:
    """What a driver noted as it had ended a trial."""

    driver: int
    ended: int
    at: float
    cpu: float
    resident_bytes: int
    seconds: dict[str, float]
    calls: dict[str, int]


def read_lines(folder: Path) -> list[Line]:
    """The lines of all drivers, in the order of time."""
    lines = []
    for file in folder.glob("*.jsonl"):
        for text in file.read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            lines.append(
                Line(
                    int(file.stem),
                    line["ended"],
                    line["at"],
                    line["cpu"],
                    line["bytes"],
                    line["seconds"],
                    line["calls"],
                )
            )
    return sorted(lines, key=lambda line: line.at)


def rows_of(lines: Sequence[Line], marks: Sequence[int]) -> list[list[str]]:
    """A row for each stretch of the study between two marks, counted in candidates."""
    reporters = {line.driver for line in lines if line.calls.get("report")}
    rows, before = [], 1  # the first waits for imports
    for mark in marks:
        stretch = lines[before - 1 : mark]
        first = {line.driver: line for line in reversed(stretch)}
        last = {line.driver: line for line in stretch}
        done = sum(1 for line in stretch if line is not first[line.driver])
        seconds = {
            part: sum(
                last[driver].seconds.get(part, 0.0) - first[driver].seconds.get(part, 0.0) for driver in last
            )
            for part in BESIDE
        }
        transactions = sum(
            last[driver].calls["database"] - first[driver].calls["database"] for driver in last
        )
        cpu = {driver: last[driver].cpu - first[driver].cpu for driver in last if driver not in reporters}
        memory = {driver: line.resident_bytes / 2**20 for driver, line in last.items()}
        quiet = max((held for driver, held in memory.items() if driver not in reporters), default=0.0)
        loud = max((held for driver, held in memory.items() if driver in reporters), default=0.0)
        rows.append(
            [
                f"{mark:,}",
                f"{(len(stretch) - 1) / (stretch[-1].at - stretch[0].at):.1f}",
                f"{1000 * sum(cpu.values()) / max(len(cpu), 1) / (len(stretch) - 1):.0f}",
                *(f"{1000 * seconds[part] / max(done, 1):.0f}" for part in BESIDE),
                f"{transactions / max(done, 1):.1f}",
                f"{quiet:.0f}",
                f"{loud:.0f}",
            ]
        )
        before = mark
    return rows


def start(number: int, folder: Path, url: str, seconds: float, words: Sequence[str]) -> subprocess.Popen[str]:
    """A driver, in a session of its own."""
    log = (folder / f"{number}.log").open("w")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.drivers.one_driver", str(folder / STUDY)),
            *(str(folder / "lines" / f"{number}.jsonl"), url, str(seconds), *words),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def ended_trials(folder: Path) -> int:
    """Number of trials that have ended."""
    return sum(file.read_bytes().count(b"\n") for file in (folder / "lines").glob("*.jsonl"))


def wait_for(candidates: int, folder: Path, drivers: Sequence[subprocess.Popen[str]]) -> None:
    """Until so many trials have ended; says how far it is.

    Raises:
        SystemExit: where a driver has ended.
    """
    said, began = 0, time.monotonic()
    while (now := ended_trials(folder)) < candidates:
        time.sleep(POLL_SECONDS)
        for number, driver in enumerate(drivers):
            if driver.poll() is not None:
                raise SystemExit(f"driver {number} has ended:\n{(folder / f'{number}.log').read_text()}")
        if now >= said + max(candidates // 20, 10):
            said = now
            print(f"{now:,} after {time.monotonic() - began:.0f} s ...", file=sys.stderr, flush=True)


def check(url: str, drivers: int) -> str:
    """What the ledger has, once all drivers have left.

    Raises:
        SystemExit: where something is lost, or there twice.
    """
    ledger = Ledger(url, STUDY, create=False)
    trials = ledger.trials(brief=True)
    with ledger.database.transaction() as connection:
        held = connection.scalar(sa.select(sa.func.count()).select_from(LEASES))
        left = connection.scalar(sa.select(sa.func.count()).select_from(DRIVERS))
    ledger.close()
    outcomes = Counter(trial.result.outcome for trial in trials)
    tries = Counter(len(trial.attempts) for trial in trials if trial.result.outcome is Outcome.COMPLETED)
    wrong = []
    if [trial.number for trial in trials] != list(range(len(trials))):
        wrong.append("a number is missing or there twice")
    if outcomes[Outcome.RUNNING] or held or left:
        wrong.append(f"{outcomes[Outcome.RUNNING]} trials run, {held} leases, {left} drivers are left")
    if set(tries) - {0, 1}:
        wrong.append(f"a trial was trained more than once: {dict(tries)}")
    if outcomes[Outcome.INTERRUPTED] > drivers:
        wrong.append(f"{outcomes[Outcome.INTERRUPTED]} trials were cut short by {drivers} drivers")
    if wrong:
        raise SystemExit("; ".join(wrong))
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.most_common())
    return f"{len(trials)} numbers, each once: {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", required=True, help="an empty PostgreSQL database")
    parser.add_argument("--drivers", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=5000)
    parser.add_argument("--marks", type=int, nargs="+", default=[100, 250, 500, 1000, 2000, 5000])
    parser.add_argument("--seconds", type=float, default=0.0, help="what a training takes")
    parser.add_argument("--sampler", default="auto")
    parser.add_argument("--space", default="default")
    arguments = parser.parse_args()
    marks = [mark for mark in arguments.marks if mark < arguments.candidates] + [arguments.candidates]
    words = [
        *(f"demo.rows={ROWS}", f"space={arguments.space}", f"sampler={arguments.sampler}"),
        *("baseline_trials=1", "parallel=1", "threads=1", "training.epochs=1", "confirm=0", "grow=no"),
        *(f"name={STUDY}", f"trials={2 * arguments.candidates + 100}"),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lines").mkdir()
        drivers = [start(0, folder, arguments.storage, arguments.seconds, words)]
        try:
            wait_for(1, folder, drivers)  # the others join a study that has begun
            drivers += [
                start(number, folder, arguments.storage, arguments.seconds, ())
                for number in range(1, arguments.drivers)
            ]
            wait_for(arguments.candidates, folder, drivers)
            began = time.monotonic()
            for driver in drivers:
                driver.send_signal(signal.SIGINT)
            for driver in drivers:
                driver.wait(END_SECONDS)
            ended = time.monotonic() - began
        finally:
            for driver in drivers:
                if driver.poll() is None:
                    os.killpg(driver.pid, signal.SIGKILL)
                    driver.wait()
        lines = read_lines(folder / "lines")
        assert set(PARTS) >= set(BESIDE) - {"database"}
        found = check(arguments.storage, arguments.drivers)
    print(f"{machine()}; {arguments.drivers} drivers, trainings of {arguments.seconds:g} s are made up")
    header = [
        "candidates",
        "per second",
        "CPU of a driver, ms",
        *(f"{part}, ms" for part in BESIDE),
        "transactions",
    ]
    header += ["MiB of a driver", "MiB of the one that writes the report"]
    print(markdown(header, rows_of(lines, marks)))
    per_driver = Counter(line.driver for line in lines[: arguments.candidates])
    print(f"candidates of a driver: {min(per_driver.values())} to {max(per_driver.values())}; {found}")
    print(f"interrupted, all had left after {ended:.0f} s, report and MLflow up to date")


if __name__ == "__main__":
    main()
