"""The Pareto front, its knee, and picks from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import bare

from dhen.errors import UserError
from search.selection import knee, pareto_front, pick
from trials.records.trial_record import Outcome, TrialRecord


def trial(number: int, ne: float, flops: float, outcome: Outcome = Outcome.COMPLETED) -> TrialRecord:
    return bare(number, ne=ne, flops=flops, outcome=outcome)


pairs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30)


@given(pairs)
def test_the_front_is_what_nothing_dominates(values: list[tuple[int, int]]) -> None:
    trials = [trial(i, ne / 20, float(flops)) for i, (ne, flops) in enumerate(values)]
    front = {t.number for t in pareto_front(trials)}
    for i, (ne, flops) in enumerate(values):
        dominated = any(n <= ne and f <= flops and (n, f) != (ne, flops) for n, f in values)
        first = values.index((ne, flops)) == i
        assert (i in front) == (not dominated and first)


def test_trials_without_a_result_are_left_out_and_scores_on_test_decide_nothing() -> None:
    trials = [trial(0, 0.9, 10), trial(1, 0.1, 1, Outcome.DIVERGED), trial(2, 0.1, 1, Outcome.RUNNING)]
    trials.append(trial(3, float("nan"), 1))
    assert [t.number for t in pareto_front(trials)] == [0]
    lower_on_test = trial(1, 0.9, 10)
    quality = lower_on_test.result.validation
    assert quality is not None
    lower_on_test = lower_on_test.with_result(test=quality.replace(ne=0.1))
    assert [t.number for t in pareto_front([trial(0, 0.8, 10), lower_on_test])] == [0]


def test_the_knee_is_where_the_front_bends() -> None:
    front = pareto_front(
        [trial(0, 0.90, 1e4), trial(1, 0.81, 2e4), trial(2, 0.805, 1e5), trial(3, 0.80, 1e6)]
    )
    found = knee(front)
    assert found is not None
    assert found.number == 1
    assert knee([]) is None


def test_picks() -> None:
    front = pareto_front([trial(0, 0.90, 1e4), trial(1, 0.81, 2e4), trial(2, 0.80, 1e6)])
    assert pick(front, "lowest").number == 2
    assert pick(front, "knee").number == 1
    assert pick(front, "flops<=5e5").number == 1
    assert pick(front, "flops <= 10000").number == 0
    for how, says in [
        ("flops<=10", "cheapest on the front needs 1e\\+04"),
        ("cheapest", "expected best, lowest, knee"),
    ]:
        with pytest.raises(UserError, match=says):
            pick(front, how)
    with pytest.raises(UserError, match="no candidate has completed"):
        pick([], "lowest")
