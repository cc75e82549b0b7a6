"""What a candidate costs beside its training, as a study grows: sampler, ledger, process, MLflow.

A real study, one candidate at a time, on a tiny generated log, so that training takes a fraction of a
second; every other part is as in a study of hours. Milliseconds a candidate: medians over the candidates since
the row before; of the thread that writes MLflow and the report, which runs beside the training, the mean.

    python -m benchmarks.search.overhead_per_candidate
        marks at 10, 100 and 1,000 candidates
    python -m benchmarks.search.overhead_per_candidate --known 10000 --marks 20
        20 candidates in a study that has 10,000 already (copies of a real one, at points of their own)
    python -m benchmarks.search.overhead_per_candidate --known 10000 --status
        the time of `status`, of `status --json` and of `report` in such a study alone, beside `--help`, which
        reads nothing

With `--storage URL` the study has its ledger in that database, an empty one on PostgreSQL, in place of SQLite.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.shared.machine_and_tables import machine, markdown
from benchmarks.shared.stopwatch import Stopwatch
from search.config import StudyConfig, write_config
from search.dataset import open_log
from search.execution.admission import Admission
from search.execution.attempts import study_parallelism
from search.execution.trainer import Trainer
from search.log_config import DemoConfig
from search.run_directory import database_url
from search.samplers.ask_tell import Proposals
from search.study.driver import StudyDriver
from search.study.open_study import open_study
from search.study.report_writer import ReportWriter
from search.study.settings import StudySettings
from search.study_state import StudyState
from spaces.space import load_space
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialRecord
from trials.runtime.launcher import Launcher
from trials.store.ledger import Ledger

PARTS = {
    "ask": (Proposals, "ask"),
    "plan": (Admission, "admit"),
    "ledger": (Ledger, "save"),
    "start": (Trainer, "start"),
    "tell": (Proposals, "tell"),
}
"""Parts of the driver's work, by the functions that do them."""
THREAD = {"MLflow and report": (ReportWriter, "_write")}
"""In a thread beside the driver, many candidates at a time."""


class Marks:
    """An observer that takes the time of each candidate, and makes a row of them at each count."""

    def __init__(self, counts: list[int], known: int, watch: Stopwatch) -> None:
        self._counts, self._known, self._watch = counts, known, watch
        self._seen, self._then, self._before = 0, 0.0, dict(watch.seconds)
        self._candidates: list[list[float]] = []
        self.rows: list[list[str]] = []

    def __call__(self, study: StudyState) -> None:
        if len(study.ended) == self._seen:
            return
        now, parts = time.perf_counter(), dict(self._watch.seconds)
        if self._seen:  # the first one waits for the fork server's imports
            self._take(study.record().trial(study.ended[-1]), now - self._then, parts)
        self._seen, self._then, self._before = len(study.ended), now, parts
        if self._counts and self._seen - 1 >= self._counts[0]:
            self._row(self._known + self._counts.pop(0))

    def _take(self, trial: TrialRecord, between: float, parts: dict[str, float]) -> None:
        training = (trial.result.measured.train_seconds or 0.0) + (
            trial.result.measured.evaluate_seconds or 0.0
        )
        each = [between - training, (trial.result.seconds or 0.0) - training, training]
        each += [parts.get(name, 0.0) - self._before.get(name, 0.0) for name in (*PARTS, *THREAD)]
        self._candidates.append(each)

    def _row(self, count: int) -> None:
        columns = list(zip(*self._candidates, strict=True))
        of_driver = [statistics.median(column) for column in columns[: -len(THREAD)]]
        of_thread = [statistics.mean(column) for column in columns[-len(THREAD) :]]
        self.rows.append([f"{count:,}", *(f"{1000 * seconds:.0f}" for seconds in (*of_driver, *of_thread))])
        self._candidates.clear()
        print(f"{count:,} candidates ...", file=sys.stderr, flush=True)


def run(study: StudyDriver) -> StudyRecord:
    """A study that is opened, run to its end; of one with a server, this driver then leaves it."""
    try:
        return study.run()
    finally:
        if study.sharing is not None:
            study.sharing.close()


def fill(config: StudyConfig, directory: Path, log: PreparedLog, launcher: Launcher, known: int) -> None:
    """A ledger with `known` candidates: one real trial, and worse and dearer copies of it at random points."""
    study = open_study(config.replace(trials=1), directory, log, launcher)
    record = run(study)
    ledger = Ledger(database_url(directory, config.storage), record.name)
    space = load_space(config.space, log.features)
    settings = StudySettings(ledger, config, directory, log, space, study_parallelism(config))
    ledger.settle(settings.setting)
    rng, one = random.Random(0), record.trials[-1]
    assert one.result.validation is not None
    assert one.job.flops is not None
    for number in range(len(record.trials), len(record.trials) + known - 1):
        worse = one.result.validation.replace(ne=one.result.validation.ne + 0.1 * rng.random())
        copy = one.replace(number=number, point=space.random_point(rng))
        copy = copy.with_job(fingerprint=str(number), flops=one.job.flops * 10 ** rng.random())
        ledger.save(copy.with_result(validation=worse, test=None))
    ledger.close()


def time_status(directory: Path, config: StudyConfig, repeats: int) -> None:
    """Prints the shortest of some calls of each command: what others do on the machine only makes them longer."""
    write_config(directory, config)
    command = str(Path(sys.executable).parent / "dhen-search")
    calls = {
        "--help": ["--help"],
        "status": ["status", str(directory)],
        "status --json": ["status", str(directory), "--json"],
        "report": ["report", str(directory)],
    }
    rows = []
    for name, words in calls.items():
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            subprocess.run([command, *words], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - began)
        rows.append([name, f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}"])
    print(machine())
    print(markdown(["command", "seconds, least", "seconds, median"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--marks", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--known", type=int, default=0)
    parser.add_argument("--status", action="store_true", help="time `status` alone")
    parser.add_argument("--repeats", type=int, default=5, help="calls of each command with --status")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--space", default="tiny")
    parser.add_argument("--sampler", default="auto")
    parser.add_argument("--storage", help="a database in place of a file in the run directory")
    arguments = parser.parse_args()
    config = StudyConfig(
        demo=DemoConfig(rows=arguments.rows),
        space=arguments.space,
        grow=False,
        sampler=arguments.sampler,
        trials=arguments.known + max(arguments.marks) + bool(arguments.known),  # the first is left out
        baseline_trials=1,
        parallel=1,
        storage=arguments.storage,
        training=TrainingConfig(epochs=1, evaluate_every=arguments.rows),
    )
    if arguments.status and not arguments.known:
        parser.error("--status needs a study: --known says of how many candidates")
    log, launcher, watch = open_log(config), Launcher(), Stopwatch()
    launcher.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if arguments.known:
            fill(config, directory, log, launcher, arguments.known)
        if arguments.status:
            time_status(directory, config, arguments.repeats)
            return
        for name, (owner, method) in (PARTS | THREAD).items():
            watch.watch(name, owner, method)
        report_writer = ReportWriter(directory, config, Console(quiet=True))
        marks = Marks(sorted(arguments.marks), arguments.known, watch)
        began = time.perf_counter()
        study = open_study(config, directory, log, launcher, (report_writer, marks))
        opened = time.perf_counter() - began
        record = run(study)
        write_config(directory, config)
        began = time.perf_counter()
        report_writer.finish(record)
        finished = time.perf_counter() - began
        status = [str(Path(sys.executable).parent / "dhen-search"), "status", str(directory)]
        began = time.perf_counter()
        subprocess.run(status, check=True, stdout=subprocess.DEVNULL)
        looked = time.perf_counter() - began
    print(machine())
    header = ["candidates", "ms beside training", "process", "training", *PARTS, *THREAD]
    print(markdown(header, marks.rows))
    print(
        f"opening the study {opened:.1f} s, bringing MLflow and the report up to date at the end {finished:.1f} s,"
    )
    print(f"`status` {looked:.2f} s")


if __name__ == "__main__":
    main()
