"""Networks that learn from an average, by the command line: trials of their own, confirmed, gone on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import AVERAGED, Run

from search.read_study import read_study
from search.run_directory import TEACHERS, folder_of
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

WORDS = (*AVERAGED, "distil=yes")


@pytest.fixture(scope="module")
def taught(dhen_search: Run, click_log: Path, averaged: Path) -> Path:
    """A study that has ended, whose networks then learnt from its best average."""
    assert not distilled_of(read_study(averaged))
    assert not (averaged / TEACHERS).exists()
    dhen_search("run", "--data", click_log, "--out", averaged, *WORDS)
    return averaged


def distilled_of(record: StudyRecord) -> list[TrialRecord]:
    return [trial for trial in record.trials if trial.kind is TrialKind.DISTILLED]


def test_networks_of_the_front_learn_from_the_best_average(taught: Path) -> None:
    record = read_study(taught)
    found = distilled_of(record)
    assert found
    averages = [trial for trial in record.trials if trial.kind is TrialKind.AVERAGE]
    best = min(averages, key=_ne)
    for trial in found:
        candidate = record.trial(trial.origin.distilled_from or 0)
        assert trial.result.outcome is Outcome.COMPLETED
        assert trial.origin.teacher == best.number
        assert trial.job.teacher == best.job.fingerprint
        assert (trial.job.model, trial.job.training, trial.job.seed) == (
            candidate.job.model,
            candidate.job.training,
            candidate.job.seed,
        )
        assert trial.job.fingerprint != candidate.job.fingerprint
        assert trial.result.validation != candidate.result.validation
    assert {trial.number for trial in found}.isdisjoint({trial.number for trial in record.candidates})
    (file,) = (taught / TEACHERS).iterdir()
    probability_N = np.load(file)
    assert len(probability_N) == record.log.rows["train"] + record.log.rows["validation"]
    assert ((probability_N > 0) & (probability_N < 1)).all()
    assert not list((taught / "trials").glob("*/logits.train.npy"))
    for trial in found:
        weights = folder_of(taught, trial) / "weights.safetensors"
        assert weights.exists() or trial.number not in record.front


def test_what_has_learnt_is_said_and_confirmed_with_its_teacher(dhen_search: Run, taught: Path) -> None:
    record = read_study(taught)
    found = distilled_of(record)
    assert "on labels that are half its predictions" in " ".join(dhen_search("status", taught).stdout.split())
    report = " ".join((taught / "report.html").read_text().split())
    assert f"s network, which learnt from trial {found[0].origin.teacher}" in report
    retrained = {record.trial(trial.origin.of or 0).kind: trial for trial in record.retrainings}
    assert record.comparisons
    if TrialKind.DISTILLED in retrained:
        assert retrained[TrialKind.DISTILLED].job.teacher == found[0].job.teacher
    others = (trial for kind, trial in retrained.items() if kind is not TrialKind.DISTILLED)
    assert all(trial.job.teacher is None for trial in others)


def test_the_same_command_changes_nothing(dhen_search: Run, click_log: Path, taught: Path) -> None:
    before = read_study(taught)
    dhen_search("run", "--data", click_log, "--out", taught, *WORDS)
    after = read_study(taught)
    assert after.trials == before.trials
    assert (after.front, after.best) == (before.front, before.best)


def test_a_lost_network_learns_again_from_the_same_predictions(
    dhen_search: Run, click_log: Path, taught: Path
) -> None:
    record = read_study(taught)
    on_front = [trial for trial in distilled_of(record) if trial.number in record.front]
    assert on_front
    weights = folder_of(taught, on_front[0]) / "weights.safetensors"
    kept = weights.read_bytes()
    weights.unlink()
    dhen_search("run", "--data", click_log, "--out", taught, *WORDS)
    assert weights.read_bytes() == kept


def _ne(trial: TrialRecord) -> float:
    assert trial.result.validation is not None
    return trial.result.validation.ne
