"""Logs of a study, through the command line: the driver's, and of each attempt those of each of its ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from command_line import TIMEOUT_SECONDS, Run, start

from search.execution import plan_trial
from search.read_study import read_study
from search.run_directory import trial_folder
from trials.cluster.cluster import Cluster
from trials.planner.estimates import PlanOptions
from trials.records.events import START_MARK
from trials.records.job import Job
from trials.records.trial_record import Outcome, TrialRecord

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
HBM = "1400KiB"
"""Enough for every network of the space below, and for some of them not under plain DP."""
SPACE = {
    "layers": "shared",
    "depth": 1,
    "slots": 1,
    "modules": {"mlp": {"mlp": [[256], [512]]}},
    "out_embeddings": 4,
    "raw_numeric": False,
    "ensemble": "sum",
    "model": {"embedding_dim": [8, 16], "numeric_mlp": [[16]], "head": [[], [128]]},
}
WORDS = ("sampler=random", "baseline_trials=1", "threads=1", "parallel=1", "ranks=1x2", f"hbm={HBM}")


def planned_with_room(
    record: TrialRecord, job: Job, clusters: Sequence[Cluster], options: PlanOptions
) -> TrialRecord:
    """A planner that is too sure of itself: it takes a rank to have four times the memory that it has."""
    roomy = [cluster.with_hbm(4 * cluster.hbm) for cluster in clusters]
    return plan_trial.planned(record, job, roomy, options)


def test_each_attempt_leaves_the_log_of_each_rank(
    dhen_search: Run, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.execution.admission.planned", planned_with_room)
    out, space = tmp_path / "study", tmp_path / "space.yaml"
    space.write_text(yaml.safe_dump(SPACE))
    training = ("training.epochs=1", "training.batch_size=512", "training.precision=fp32")
    words = ("trials=4", f"space={space}", *WORDS, *training)
    shown = dhen_search("run", "-v", "--data", click_log, "--out", out, *words).stderr
    record = read_study(out)
    ended = [[attempt.outcome for attempt in trial.attempts] for trial in record.trials]
    climbed = record.trials[ended.index([Outcome.OUT_OF_MEMORY, Outcome.COMPLETED])]
    folder = trial_folder(out, climbed.number)
    for number, attempt in enumerate(climbed.attempts):
        for rank in range(2):
            log = (folder / f"attempt{number}.rank{rank}.log").read_text()
            worker = rf"{STAMP} INFO rank {rank} trials\.runtime\.worker: "
            begins = rf"attempt{number}: strategy {re.escape(attempt.strategy)}, rank {rank} of 2 "
            assert len(re.findall(f"^{worker}{begins}", log, re.MULTILINE)) == 1
            assert log.count("INFO") == len(re.findall(f"^{STAMP} INFO rank {rank} ", log, re.MULTILINE))
            assert ("ERROR" in log) == (attempt.outcome is Outcome.OUT_OF_MEMORY)
            assert ("training ended: best NE" in log) == (attempt.outcome is Outcome.COMPLETED)
            assert "DEBUG" not in log
    assert (
        f"({climbed.attempts[0].error})" in shown
    )  # which ends as the exception does, not with lines of a log
    assert re.search(r"MemoryLimitError: out of memory: .*\)$", climbed.attempts[0].error or "")
    for text in (shown, (out / "driver.log").read_text()):
        for number, attempt in enumerate(climbed.attempts):
            line = f"trial {climbed.number}: attempt {number} as {attempt.strategy}"
            trainer = rf"^{STAMP} INFO search\.execution\.trainer: {re.escape(line)}$"
            assert len(re.findall(trainer, text, re.MULTILINE)) == 1
    scored = trial_folder(out, record.front[-1]) / "scoring-test.rank0.log"
    assert re.search(r"trials\.runtime\.worker: test: NE 0\.\d+ of", scored.read_text())


def process_of(log: Path) -> int:
    """The process that writes a log, as soon as it says that it trains."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if log.exists() and "training begins" in (text := log.read_text()):
            return int(text.rpartition(f"{START_MARK}process ")[2].partition(",")[0])
        time.sleep(0.01)
    raise AssertionError(f"{log} did not get that far")


def test_a_killed_rank_is_told_with_the_log_of_its_attempt(
    click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "study"
    folder = trial_folder(out, 0)
    long = ("training.epochs=9", "training.patience=9", "ranks=1x2", "-vv")
    driver = start(click_log, out, environment, "trials=1", *long)
    os.kill(process_of(folder / "attempt0.rank1.log"), signal.SIGKILL)
    _, shown = driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 0, shown
    killed, again = read_study(out).trials[0].attempts
    assert killed.outcome is Outcome.INTERRUPTED
    assert again.outcome is Outcome.COMPLETED
    named = re.search(r"rank 1 was killed by signal 9 .*(attempt0\.rank1\.log)", killed.error or "")
    assert named, killed.error
    assert (folder / named[1]).exists()
    for name in ("attempt0.rank0.log", "attempt0.rank1.log", "attempt1.rank0.log", "attempt1.rank1.log"):
        assert "DEBUG rank " in (folder / name).read_text()  # as -vv asks for
    assert "training ended" in (folder / "attempt1.rank1.log").read_text()
    assert f"trial 0: {Outcome.INTERRUPTED} ({killed.error}), and is tried again" in shown
