"""How much a study may still do, by the number of its candidates, by the clock, and by what it has done before."""

from __future__ import annotations

from typing import Any

import pytest
from records import bare, judged

from search.config import read_study_config
from search.study.budget import NOTHING_NEW, Budget
from search.study_state import StudyState
from trials.record import Outcome, TrialKind, TrialRecord


def begun(searched: int = 0, tuned: int = 0, baselines: int = 1, **facts: Any) -> list[TrialRecord]:
    """Trials of the baseline, of the search and of the tuning stage, whatever has become of them."""
    kinds = [TrialKind.BASELINE] * baselines + [TrialKind.CANDIDATE] * (searched + tuned)
    trials = [bare(number, ne=0.9, flops=1.0, kind=kind, **facts) for number, kind in enumerate(kinds)]
    first = baselines + searched
    return trials[:first] + [trial.with_origin(tuned_from=baselines) for trial in trials[first:]]


def budget(
    words: str, trials: list[TrialRecord], elapsed_seconds: float = 0.0, *, spent: bool = False
) -> Budget:
    state = StudyState(judged([]), trials)
    state.elapsed_seconds = lambda: elapsed_seconds  # type: ignore[method-assign]
    return Budget(read_study_config(None, words.split()), state, spent=spent)


def test_the_search_is_over_with_as_many_candidates_as_were_asked_for() -> None:
    """Trials of the baseline, of tuning and on all rows are no candidates of the search."""
    assert not budget("trials=3", begun(2, tuned=5, baselines=4)).search_is_over(0)
    assert budget("trials=3", begun(3)).search_is_over(0)
    promoted = bare(9, ne=0.9, flops=1.0, promoted_from=1)
    assert not budget("trials=3", [*begun(2), promoted]).search_is_over(0)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_candidate_counts_however_it_ended_and_while_it_runs(outcome: Outcome) -> None:
    """What was cut short goes on besides, under its own number."""
    assert budget("trials=2", begun(2, outcome=outcome)).search_is_over(0)


def test_proposals_that_need_no_training_end_a_search_without_a_number_of_trials_alone() -> None:
    assert not budget("trials=null minutes=9", begun()).search_is_over(NOTHING_NEW - 1)
    assert budget("trials=null minutes=9", begun()).search_is_over(NOTHING_NEW)
    assert not budget("trials=500", begun()).search_is_over(NOTHING_NEW)


def test_minutes_alone_leave_the_number_of_candidates_open() -> None:
    assert budget("", begun(20)).search_is_over(0)
    assert not budget("", begun(19)).search_is_over(0)
    assert not budget("minutes=9", begun(200)).search_is_over(0)
    assert budget("minutes=9", begun(200), 540.0).search_is_over(0)


def test_minutes_end_search_and_tuning() -> None:
    trials = begun(1)
    for elapsed, over in ((119.0, False), (120.0, True)):
        assert budget("trials=9 minutes=2", trials, elapsed).search_is_over(0) is over
        assert budget("trials=9 tune=2 minutes=2", trials, elapsed).tuning_is_over() is over


def test_the_search_leaves_the_minutes_that_tuning_takes_at_the_pace_so_far() -> None:
    trials = begun(searched=9)  # with the baseline ten
    words = "trials=99 tune=2 minutes=10"  # 500 s / 10 trials * 2 = 100 s
    assert not budget(words, trials, 499.0).search_is_over(0)
    assert budget(words, trials, 500.0).search_is_over(0)
    assert not budget("trials=99 minutes=10", trials, 500.0).search_is_over(0)


def test_tuning_takes_half_of_the_minutes_at_most() -> None:
    words = "trials=99 tune=50 minutes=10"
    assert not budget(words, begun(searched=9), 299.0).search_is_over(0)
    assert budget(words, begun(searched=9), 300.0).search_is_over(0)


def test_what_is_tuned_already_needs_no_minutes() -> None:
    trials = begun(searched=8, tuned=1)
    assert not budget("trials=99 tune=1 minutes=10", trials, 599.0).search_is_over(0)


def test_the_clock_does_not_end_a_study_without_minutes() -> None:
    assert not budget("trials=9 tune=2", begun(1), 1e9).search_is_over(0)
    assert not budget("trials=9 tune=2", begun(1), 1e9).tuning_is_over()


def test_tuning_is_over_with_as_many_candidates_as_it_was_given() -> None:
    assert not budget("trials=3 tune=2", begun(3, tuned=1)).tuning_is_over()
    assert budget("trials=3 tune=2", begun(3, tuned=2)).tuning_is_over()
    assert budget("trials=3", begun(3)).tuning_is_over()


def test_a_study_that_had_come_to_its_end_with_this_budget_does_no_more() -> None:
    left = budget("trials=null minutes=60 tune=5", begun(1), 1.0, spent=True)
    assert left.search_is_over(0)
    assert left.tuning_is_over()
