"""One command with minutes, as a user runs it: a clock that the test moves stands in for the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import SMALL, Run

from search.execution import running
from search.execution.budget import Budget
from search.execution.clock import StudyClock
from search.read_study import read_study
from search.verbs import run as verb
from trials.records.trial_record import Measurements, TrialKind

TRAINING = 4.0
"""Seconds that each training takes, by the clock that the test moves."""


def test_minutes_alone_search_average_and_confirm(
    dhen_search: Run, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes by the trainings in the run directory, each of which takes as long as the others: what a
    loaded machine makes of them decides nothing."""
    out = tmp_path / "study"

    def now() -> float:
        return TRAINING * sum(
            1 for folder in ("trials", "retrained/trials") for _ in (out / folder).glob("0*")
        )

    monkeypatch.setattr(verb, "StudyClock", lambda: StudyClock(now, began=0.0))
    monkeypatch.setattr(running.Training, "_seconds", lambda _: TRAINING)
    monkeypatch.setattr(Measurements, "whole_seconds", TRAINING)
    # plans, which know nothing of that clock, say that some would take longer
    monkeypatch.setattr(Budget, "is_worth_its_time", lambda *_: True)
    words = ("run", "--data", click_log, "--out", out, *SMALL, "training.epochs=1", "minutes=2.5")
    said = dhen_search(*words).stdout
    record = read_study(out)
    assert record.finished
    assert 0.8 * 150 <= record.elapsed_seconds <= 1.1 * 150
    # as many as a quarter of the minutes allows for the winners that there are
    seeds = {len(comparison.seeds) for comparison in record.comparisons}
    assert len(seeds) == 1
    assert seeds <= {2, 3, 4, 5}
    assert "Retrained from" in said
    assert TrialKind.CANDIDATE in {trial.kind for trial in record.trials}
    dhen_search("run", "--out", out)
    assert read_study(out).trials == record.trials
