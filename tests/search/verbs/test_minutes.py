"""One command with minutes, as a user runs it: a clock that the tests move stands in for the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import SMALL, Run

from search.budget.budget import Budget
from search.budget.clock import StudyClock
from search.budget.later_stages import LaterStages
from search.execution import running
from search.read_study import read_study
from search.run_directory import REPORT
from search.verbs import run as verb
from trials.record import Measured, TrialKind

TRAINING = 4.0
"""Seconds that each training takes, by the clock that the test moves."""


@pytest.fixture
def run_study(
    dhen_search: Run, click_log: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs a study whose clock goes by the trainings in its run directory, each of which takes as long as the
    others: what a loaded machine makes of them decides nothing. Gives what it said."""

    def now() -> float:
        return TRAINING * sum(
            1 for folder in ("trials", "retrained/trials") for _ in (out / folder).glob("0*")
        )

    monkeypatch.setattr(verb, "StudyClock", lambda: StudyClock(now, began=0.0))
    monkeypatch.setattr(running.Training, "_seconds", lambda _: TRAINING)
    monkeypatch.setattr(Measured, "whole_seconds", TRAINING)
    # plans, which know nothing of that clock, say that some would take longer
    monkeypatch.setattr(Budget, "is_worth_its_time", lambda *_: True)

    def run(*words: str) -> str:
        command = ("run", "--data", click_log, "--out", out, *SMALL, "training.epochs=1")
        return dhen_search(*command, *words).stdout

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The run directory."""
    return tmp_path / "study"


def test_minutes_alone_search_average_and_confirm(
    dhen_search: Run, out: Path, run_study: Callable[..., str]
) -> None:
    said = run_study("minutes=2.5")
    record = read_study(out)
    assert record.finished
    assert 0.8 * 150 <= record.elapsed_seconds <= 1.1 * 150
    # as many as a quarter of the minutes allows for the winners that there are
    seeds = {len(comparison.seeds) for comparison in record.comparisons}
    assert len(seeds) == 1
    assert seeds <= {2, 3, 4, 5}
    assert "Retrained from" in said
    kinds = {trial.kind for trial in record.trials}
    assert TrialKind.CANDIDATE in kinds
    again = dhen_search("run", "--out", out).stdout
    assert "Traceback" not in again
    assert read_study(out).trials == record.trials


def test_the_best_is_confirmed_where_there_is_no_time_for_all_winners(
    dhen_search: Run, out: Path, run_study: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the baseline and one network, or two, from two seeds
    monkeypatch.setattr(LaterStages, "confirmation", lambda _, within: 4.5 * TRAINING)
    said = run_study("seed=5", "averages=0", "refit=no", "minutes=2", "sampler=random")
    record = read_study(out)
    assert record.choice is not None
    confirmed = {comparison.trial for comparison in record.comparisons}
    assert record.best in confirmed, said
    assert confirmed < {winner.trial for winner in record.choice.winners}
    sentence = (
        f"For want of time {len(confirmed)} of the {len(record.choice.winners)} winners, the best first, "
    )
    assert sentence in said
    assert sentence in (out / REPORT).read_text()
    dhen_search("confirm", out, "--seeds", 2)
    assert "For want of time" not in dhen_search("status", out).stdout


def test_networks_learn_where_the_minutes_are_too_few_to_confirm_winners(
    out: Path, run_study: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that no confirmation could have had is not kept for it."""
    monkeypatch.setattr(LaterStages, "one_seed", lambda _: 1000.0)
    monkeypatch.setattr(LaterStages, "least_confirmation", lambda _: 1000.0)
    said = run_study("seed=3", "minutes=1.5")
    assert TrialKind.DISTILLED in {trial.kind for trial in read_study(out).trials}, said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("worth=0.1",), "worth: 0.1 could be 0.1 % or 10 %; write the sign, such as 0.1%"),
        (("worth=200%",), "worth: 200% is more than all there is"),
        (("search_until=soon",), "search_until: Input should be 'auto' or 'none'"),
        (("trials=null",), "a study needs a budget: give trials=N, minutes=M, both, or search_until=auto."),
    ],
)
def test_what_cannot_be_meant_is_refused(
    dhen_search: Run, click_log: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = dhen_search("run", "--data", click_log, "--out", tmp_path / "study", *words, code=2)
    assert message in done.stderr
