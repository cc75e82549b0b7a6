"""One of the drivers of `benchmarks.drivers.many_drivers`: the product's own session, with trainings made up.

    python -m benchmarks.drivers.one_driver OUT LINES URL SECONDS [key=value ...]

Begins the study with these words, or joins it if there are none. Into LINES goes a line of JSON for each trial
that this driver has ended: how many the study has by then, the moment, its memory, and the seconds so far: of its
CPU, in parts of its work, and in transactions of the database.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.console import Console

from benchmarks.drivers.made_up_training import MadeUpTrainings
from benchmarks.shared.stopwatch import Stopwatch
from search.execution.admission import Admission
from search.execution.clock import StudyClock
from search.samplers.ask_tell import Proposals
from search.study.drivers import Sharing, join
from search.study.report_writer import ReportWriter
from search.study.run_session import join_session, run_session
from search.study.trial_runner import TrialRunner
from trials.records.trial_record import TrialRecord
from trials.store.database import Database

PARTS = {
    "ask": (Proposals, "ask"),
    "plan": (Admission, "admit"),
    "follow others": (Sharing, "sync"),
    "take in": (TrialRunner, "take_in"),
    "report": (ReportWriter, "_write"),
}
"""Parts of a driver's work by the functions that do them; the report and MLflow have a thread of their own."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def watch_transactions(watch: Stopwatch) -> None:
    """Times transactions from their begin to their commit, waits for other drivers' locks included."""
    transaction = Database.transaction

    @contextlib.contextmanager
    def timed(self: Database) -> Iterator[sa.Connection]:
        began = time.perf_counter()
        try:
            with transaction(self) as connection:
                yield connection
        finally:
            watch.seconds["database"] += time.perf_counter() - began
            watch.calls["database"] += 1

    Database.transaction = timed  # type: ignore[method-assign]


def write_lines(file: Path, watch: Stopwatch) -> None:
    """Has a line written for each trial that this driver ends."""
    take_in = TrialRunner.take_in
    lines = file.open("a", buffering=1)

    def noted(self: TrialRunner, record: TrialRecord) -> None:
        take_in(self, record)
        line: dict[str, Any] = {
            "ended": len(self._state.ended),
            "at": time.monotonic(),
            "cpu": time.process_time(),
            "bytes": resident_bytes(),
            "seconds": dict(watch.seconds),
            "calls": dict(watch.calls),
        }
        lines.write(json.dumps(line) + "\n")

    TrialRunner.take_in = noted  # type: ignore[method-assign]


def main() -> None:
    """See the file's docstring."""
    # a shell has commands in its background ignore it, and theirs too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, file, url, seconds, *words = sys.argv[1:]
    launcher, watch = MadeUpTrainings(float(seconds)), Stopwatch()
    for name, (owner, method) in PARTS.items():
        watch.watch(name, owner, method)
    watch_transactions(watch)
    write_lines(Path(file), watch)
    if words:
        run_session((*words, f"storage={url}"), (), Path(out), launcher, quiet=True)
    else:
        console = Console(stderr=True)
        join_session(join(url, None, None, (), ()), launcher, StudyClock(), console, quiet=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
