"""Trials come back whole of their columns; in brief they lack what no summary shows, and nothing else."""

from __future__ import annotations

import pytest
from records import study

from dashboards.sentences.summary import sentences
from dashboards.terminal.tables import progress_line, trial_table
from trials.records.study_record import StudyRecord
from trials.records.trial_record import PlanSummary, TrialKind, TrialRecord
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger, StudySetting

CLUSTER = {"name": "small", "hosts": 2, "gpus_per_host": 2, "hbm": 2**30}
SETTING = StudySetting(directory="/runs/a", log="l", features={}, seed=0, version=1, cluster=CLUSTER)


@pytest.fixture(scope="module")
def record() -> StudyRecord:
    """Trials of every outcome, one that runs, one with a plan, and one with a plan that does not fit."""
    made_up = study(40, finished=False)
    plan = PlanSummary(
        strategy="dp",
        fits=True,
        examples_per_rank=8,
        memory_bytes={"parameters": 300},
        step_seconds={"forward": 0.5},
        peak_at="backward",
        reason="It needs 300 B.",
        restricted_to="dp",
    )
    without_fit = plan.replace(fits=False, remedy="hbm=2GiB", reason="It lacks 1 GiB.")
    planned = [
        trial.with_plan(summary=summary)
        for trial, summary in zip(made_up.trials[4:6], (plan, without_fit), strict=True)
    ]
    return made_up.replace(trials=(*made_up.trials[:4], *planned, *made_up.trials[6:]))


@pytest.fixture(scope="module")
def ledger(record: StudyRecord, tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    ledger = Ledger(sqlite_url(tmp_path_factory.mktemp("ledger") / "study.db"), "a")
    ledger.settle(SETTING)
    for trial in record.trials:
        ledger.save(trial)
    return ledger


@pytest.fixture(scope="module")
def in_brief(ledger: Ledger) -> list[TrialRecord]:
    return ledger.trials(brief=True)


def test_trials_come_back_whole(record: StudyRecord, ledger: Ledger) -> None:
    assert any(len(trial.result.curve) > 1 for trial in record.trials)
    assert any(trial.job.cost for trial in record.trials)
    assert tuple(ledger.trials()) == record.trials


def test_in_brief_a_trial_lacks_its_point_its_cost_and_a_candidate_its_curve_but_the_last_evaluation(
    record: StudyRecord, in_brief: list[TrialRecord]
) -> None:
    for whole, brief in zip(record.trials, in_brief, strict=True):
        whole = whole.replace(point={}).with_job(cost=())
        if whole.kind is TrialKind.CANDIDATE:
            whole = whole.with_result(curve=whole.result.curve[-1:])
        if (plan := whole.plan.summary) and plan.fits:
            whole = whole.with_plan(summary=_in_brief(plan))
        assert brief == whole


def _in_brief(plan: PlanSummary) -> PlanSummary:
    """The plan without its items and its reasons."""
    return plan.replace(memory_bytes={}, step_seconds={}, peak_at="", reason="", rejected=(), notes=())


def test_a_study_says_the_same_of_itself(record: StudyRecord, in_brief: list[TrialRecord]) -> None:
    brief = record.replace(trials=tuple(in_brief))
    assert sentences(brief) == sentences(record)
    assert progress_line(brief) == progress_line(record)
    tables = [trial_table(each, rows=100) for each in (brief, record)]
    assert [[*column.cells] for column in tables[0].columns] == [[*c.cells] for c in tables[1].columns]
