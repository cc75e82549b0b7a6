"""Whole studies in which one process is killed at a random moment: what is lost, done twice, left behind.

Each study is one command in a folder of its own, on a generated log, with so little memory declared that
candidates need different techniques. SIGKILL goes to a rank, to the fork server, or to the driver, in turn; after
a killed driver the same command is given again. Then the ledger is compared with that of a study nobody
disturbed: equal points, outcomes, techniques, metrics to the last bit. Ctrl-C ends all that was started.

    python -m benchmarks.processes.killed_processes [--studies 30] [--seed 0]

Columns: trials lost (without the result they have undisturbed), doubled (in the ledger, in MLflow, or trained
again more often than once a kill), different (in anything but time and bytes), processes left behind after 30 s,
and seconds from the kill until all processes that it concerns were gone.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.processes.marked_processes import (
    MARK,
    Process,
    kill_all,
    marked,
    ranks,
    servers,
    wait_until_gone,
)
from benchmarks.shared.generated_log import write_log
from benchmarks.shared.machine_and_tables import machine, markdown
from search.read_study import read_study
from search.run_directory import trial_folder
from trials.records.events import EVENTS, START_MARK
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialRecord

VICTIMS = ("rank", "fork server", "driver")
MEMORY = {"2x2": "230KiB", "1x2": "400KiB", "1x1": "500KiB"}
"""Declared for a rank, by ranks: enough for all candidates, and for some of them not under plain DP; with room, or
it is chance who runs out of memory."""
ROWS, COLUMNS = 3000, (10, 30, 100, 300)
SPACE = {
    "layers": "shared",
    "depth": [1, 2],
    "slots": 1,
    "modules": {"mlp": {"mlp": [[16], [64]]}, "linear": {}, "dcn_v2": {"layers": [1]}},
    "out_embeddings": [4, 16],
    "raw_numeric": False,
    "ensemble": "sum",
    "model": {"embedding_dim": [4, 8, 16], "numeric_mlp": [[16]], "head": [[], [128]]},
}
BASELINE = {"family": "dhen", "embedding_dim": 8, "layers": [{"modules": ["linear"], "out_embeddings": 4}]}
WORDS = (
    *("label=label", "trials=3", "baseline_trials=1", "sampler=random", "parallel=1", "threads=1"),
    *("training.epochs=1", "training.batch_size=256", "training.precision=fp32"),
)
TRIALS = 4
FAREWELL_SECONDS, STUDY_SECONDS = 30.0, 900.0
LOOK_SECONDS, CHANCE = 0.1, 8
"""Ten times a second somebody may be killed, ranks at one look in so many: also late in their lives."""
LONGEST_WAIT_SECONDS = 3.0
"""From the start of a trial, or of the command, drawn at random, to the kill."""
SPECIFIC = {"seconds", "started_at", "curve", "attempts", "peak_memory_bytes", "plan", "examples_per_second"}
SPECIFIC |= {"step_ms", "train_seconds", "evaluate_seconds", "predicted_peak_bytes", "predicted_step_seconds"}
"""What two runs of one trial may differ in."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one kill did."""

    victim: str
    shape: str
    training: bool
    """Whether ranks were at work."""
    lost: int
    doubled: int
    different: int
    left_behind: int
    seconds: float


class Bench:
    """The log, the words, and the studies nobody disturbs."""

    def __init__(self, folder: Path, command: str, seed: int) -> None:
        self._folder, self._command, self._rng = folder, command, random.Random(seed)
        self.mark = folder.name
        self._whole: dict[str, Path] = {}
        write_log(folder / "log.parquet", ROWS, COLUMNS)
        for name, content in {"space": SPACE, "baseline": BASELINE}.items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))

    def start(self, shape: str, out: Path) -> subprocess.Popen[bytes]:
        """The command, which says what it does into a file beside `out`."""
        files = [f"{name}={self._folder / name}.yaml" for name in ("space", "baseline")]
        words = (*WORDS, *files, f"ranks={shape}", f"hbm={MEMORY[shape]}")
        run = [self._command, "run", "--data", str(self._folder / "log.parquet"), "--out", str(out), *words]
        environment = {
            MARK: self.mark,
            "DHEN_SEARCH_CACHE": str(self._folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        with out.with_suffix(".txt").open("ab") as said:
            return subprocess.Popen(
                run, env=os.environ | environment, stdout=said, stderr=said, start_new_session=True
            )

    def undisturbed(self, shape: str) -> Path:
        """The study's folder."""
        if shape not in self._whole:
            out = self._folder / f"whole-{shape}"
            finished(self.start(shape, out), out)
            self._whole[shape] = out
        return self._whole[shape]

    def disturbed(self, victim: str, shape: str, number: int) -> Finding:
        """One study with one kill; where nobody was there to kill any more, another study."""
        whole = self.undisturbed(shape)
        concerned, at_work, again = list[Process](), False, 0
        while not concerned:
            out, again = self._folder / f"{number}-{again}", again + 1
            process = self.start(shape, out)
            concerned, at_work = self._kill(victim, process, out)
            killed = time.monotonic()
            left = wait_until_gone(self.mark, {each.pid for each in concerned}, FAREWELL_SECONDS)
            gone_seconds = time.monotonic() - killed
            if concerned and victim == "driver":
                process.wait()
                process = self.start(shape, out)
            finished(process, out)
        left |= wait_until_gone(self.mark, {each.pid for each in marked(self.mark)} - left, FAREWELL_SECONDS)
        kill_all(self.mark)
        return Finding(
            victim=victim,
            shape=shape,
            training=at_work,
            left_behind=len(left),
            seconds=gone_seconds,
            **compared(whole, out),
        )

    def _kill(self, victim: str, driver: subprocess.Popen[bytes], out: Path) -> tuple[list[Process], bool]:
        """At a random moment; the processes that must end with the one killed, and whether ranks were at work.

        None if it was too late.
        """
        after = self._rng.randrange(-1, TRIALS)
        while after >= 0 and not (trial_folder(out, after) / EVENTS).exists() and driver.poll() is None:
            time.sleep(LOOK_SECONDS)
        time.sleep(self._rng.uniform(0, LONGEST_WAIT_SECONDS))
        while driver.poll() is None:
            there = marked(self.mark)
            found = {
                "rank": ranks(there) if self._rng.randrange(CHANCE) == 0 else [],
                "fork server": servers(there),
                "driver": [process for process in there if process.pid == driver.pid],
            }[victim]
            if found:
                self._rng.choice(found).kill()
                its = ranks(there)
                ends = {"rank": its, "fork server": its + servers(there), "driver": there}[victim]
                return ends, bool(its)
            time.sleep(LOOK_SECONDS)
        return [], False


def finished(process: subprocess.Popen[bytes], out: Path) -> None:
    """Waits for a study's end, which must be a good one."""
    if process.wait(STUDY_SECONDS) != 0:
        sys.exit(f"exit code {process.returncode}:\n{out.with_suffix('.txt').read_text()}")


def compared(whole: Path, out: Path) -> dict[str, int]:
    """Trials lost, doubled and different."""
    expected, found = read_study(whole), read_study(out)
    known = {trial.number: trial for trial in found.trials}
    doubled = len(found.trials) - len(expected.trials) + trained_twice(found) - trained_twice(expected)
    doubled += max(0, starts(out, found) - starts(whole, expected) - 1)
    doubled += mlflow_runs(out) - mlflow_runs(whole)
    changed = sum(outcome(trial) != outcome(known.get(trial.number)) for trial in expected.trials)
    return {
        "lost": sum(is_lost(trial, known.get(trial.number)) for trial in expected.trials),
        "doubled": doubled,
        "different": changed + (found.front != expected.front),
    }


def is_lost(trial: TrialRecord, found: TrialRecord | None) -> bool:
    unfinished = (Outcome.RUNNING, Outcome.INTERRUPTED)
    if found is None or found.result.outcome in unfinished:
        return True
    return trial.result.outcome is Outcome.COMPLETED and found.result.outcome is not Outcome.COMPLETED


def outcome(trial: TrialRecord | None) -> dict[str, object]:
    """What must not depend on kills; of the curve, NE by examples."""
    if trial is None:
        return {}
    curve = [(point.examples, point.validation) for point in trial.result.curve]
    return {"record": _without(trial.model_dump(), SPECIFIC), "curve": curve}


def _without(value: Any, names: set[str]) -> Any:
    """Plain data, without what has one of these names at any depth."""
    if isinstance(value, dict):
        return {key: _without(each, names) for key, each in value.items() if key not in names}
    return [_without(each, names) for each in value] if isinstance(value, (list, tuple)) else value


def trained_twice(record: StudyRecord) -> int:
    """Trainings of networks that another trial has trained."""
    trained = Counter(
        trial.job.fingerprint
        for trial in record.trials
        if trial.attempts and trial.origin.reused_from is None
    )
    return sum(trained.values()) - len(trained)


def starts(out: Path, record: StudyRecord) -> int:
    """How often first ranks were started, but for what ran out of memory; one that was killed may be once more."""
    logs = [log for trial in record.trials for log in trial_folder(out, trial.number).glob("*.rank0.log")]
    begun = sum(log.read_text(errors="replace").count(START_MARK) for log in logs)
    attempts = [attempt for trial in record.trials for attempt in trial.attempts]
    return begun - sum(attempt.outcome is Outcome.OUT_OF_MEMORY for attempt in attempts)


def mlflow_runs(out: Path) -> int:
    with closing(sqlite3.connect(out / "mlflow.db")) as connection:
        return int(connection.execute("select count(*) from runs").fetchone()[0])


def row(name: str, findings: list[Finding]) -> list[object]:
    counts = [
        sum(getattr(f, key) for f in findings) for key in ("lost", "doubled", "different", "left_behind")
    ]
    seconds = [f.seconds for f in findings]
    at_work = sum(f.training for f in findings)
    times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
    return [name, len(findings), at_work, TRIALS * len(findings), *counts, times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", default=str(Path(sys.executable).parent / "dhen-search"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder), arguments.command, arguments.seed)
        try:
            for number in range(arguments.studies):
                shape = list(MEMORY)[number // len(VICTIMS) % len(MEMORY)]
                findings.append(bench.disturbed(VICTIMS[number % len(VICTIMS)], shape, number))
                print(f"{number + 1} of {arguments.studies}: {findings[-1]}", file=sys.stderr, flush=True)
        finally:
            kill_all(bench.mark)
            print_table(findings)


def print_table(findings: list[Finding]) -> None:
    """Of the studies so far: one broken off has some too."""
    found = {victim: [f for f in findings if f.victim == victim] for victim in VICTIMS}
    rows = [row(victim, its) for victim, its in (found | {"all": findings}).items() if its]
    header = ["killed", "studies", "ranks at work", "trials", "lost", "doubled", "different", "left behind"]
    print(machine())
    print(markdown([*header, "s until gone: median, most"], rows))


if __name__ == "__main__":
    main()
