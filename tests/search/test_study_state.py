"""How a study stands: the time that counts against its budget, and who has won so far."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import bare, judged

from search import selection
from search.selection import eligible, ne_of
from search.study_state import StudyState
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def trial(
    number: int,
    *,
    start: float = 0.0,
    seconds: float | None = 10.0,
    outcome: Outcome = Outcome.COMPLETED,
    ne: float = 0.8,
    flops: float = 1e6,
    kind: TrialKind = TrialKind.CANDIDATE,
    reused_from: int | None = None,
) -> TrialRecord:
    """A trial that began `start` seconds after noon."""
    return bare(
        number,
        ne=ne,
        flops=flops,
        kind=kind,
        outcome=outcome,
        seconds=seconds,
        started_at=(NOON + timedelta(seconds=start)).isoformat(timespec="milliseconds"),
        reused_from=reused_from,
    )


def standing(*trials: TrialRecord) -> StudyState:
    return StudyState(judged([]), trials)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(0, 10), (10, 5)], 15.0),
        ([(0, 10), (2, 10)], 12.0),
        ([(0, 100), (20, 10), (90, 20)], 110.0),
        ([(3600, 10), (0, 10), (5, 10)], 25.0),
        ([(0, 10), (0, 10)], 10.0),
        ([], 0.0),
    ],
    ids=["one after another", "side by side", "one within another", "two sessions", "both at once", "none"],
)
def test_time_side_by_side_counts_once(spans: list[tuple[float, float]], seconds: float) -> None:
    trials = [trial(i, start=start, seconds=length) for i, (start, length) in enumerate(spans)]
    assert standing(*trials).elapsed_seconds() == pytest.approx(seconds)


def test_what_is_cut_short_or_shared_takes_no_time_and_what_runs_counts_until_now() -> None:
    cut = trial(0, seconds=None, outcome=Outcome.INTERRUPTED)
    shared = trial(1, start=5, seconds=0.0, reused_from=2)
    unplanned = trial(2).with_origin(started_at=None).with_result(seconds=0.0)
    assert standing(cut, shared, unplanned).elapsed_seconds() == 0.0
    began = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    running = trial(0, seconds=None, outcome=Outcome.RUNNING).with_origin(started_at=began)
    assert 3600.0 <= standing(running).elapsed_seconds() < 3700.0


def test_the_front_is_of_candidates_and_the_baseline_beside_it() -> None:
    worse = trial(0, kind=TrialKind.BASELINE, ne=0.95)
    baseline = trial(1, kind=TrialKind.BASELINE, ne=0.9)
    cheap, best, beaten = trial(2, flops=1e5, ne=0.85), trial(3, ne=0.7), trial(4, ne=0.75, flops=2e6)
    now = standing(worse, baseline, cheap, best, beaten)
    assert [trial.owner for trial in now.selection.front] == [2, 3]
    now.note(trial(5, ne=0.6, flops=1e5, reused_from=9))
    assert [trial.owner for trial in now.selection.front] == [9]
    record = now.record()
    assert (record.baseline, record.front, record.best) == (1, (5,), 5)


def test_averages_beside_candidates() -> None:
    """They are on the front and no candidates; networks that they or later ones are made of keep their weights."""
    baseline, cheap, dear = trial(0, kind=TrialKind.BASELINE, ne=0.9), trial(1, flops=1e5), trial(2, ne=0.7)
    behind = trial(3, flops=2e5, ne=0.85)
    average = trial(4, kind=TrialKind.AVERAGE, flops=3e5, ne=0.65).with_origin(members=(1, 3))
    now = StudyState(judged([]), (baseline, cheap, dear, behind, average), averages=True)
    assert [each.number for each in now.selection.front] == [1, 4]
    assert [each.number for each in now.selection.networks] == [1, 2]
    assert {each.number for each in now.selection.trained} == {0, 1, 2, 3}
    assert [each.number for each in now.candidates] == [1, 2, 3]
    now.note(behind.with_result(outcome=Outcome.FAILED))
    assert [each.number for each in now.selection.front] == [1, 2]


def any_trial(
    number: int, ne: float, flops: float, table_bytes: int | None, outcome: Outcome, name: str | None
) -> TrialRecord:
    kind = TrialKind.BASELINE if number < 2 else TrialKind.CANDIDATE
    made = trial(number, ne=ne, flops=flops, outcome=outcome, kind=kind)
    return made.with_job(fingerprint=name or str(number), table_bytes=table_bytes)


TRIALS = st.builds(
    any_trial,
    st.integers(0, 15),
    st.sampled_from([0.7, 0.71, 0.72, 0.73, 0.74, 0.75, 0.76, math.nan]),
    st.sampled_from([1e4, 1e5, 1e6, 1e7]),
    st.sampled_from([10, 20, 30, None]),
    st.sampled_from([*[Outcome.COMPLETED] * 4, Outcome.RUNNING, Outcome.FAILED]),
    st.sampled_from(["a", "b", "c", None, None, None, None]),
)


@given(st.lists(TRIALS, max_size=40), st.booleans())
@settings(max_examples=300)
def test_what_is_kept_up_trial_by_trial_is_what_all_of_them_give(
    noted: list[TrialRecord], averages: bool
) -> None:
    """In whatever order they come, with equal jobs and equal NE, and where one has changed."""
    state = StudyState(judged([]), [], averages=averages)
    for each in noted:
        state.note(each)
        anew = selection.judged(eligible(state.trials.values()), state.networks, averages=averages)
        assert state.selection == anew
        for name, trials in vars(anew).items():
            for one, other in zip(at(getattr(state.selection, name)), at(trials), strict=True):
                assert one is other, name
    numbers = sorted({each.number for each in noted})
    assert list(state.trials) == numbers
    assert [each.number for each in state.candidates] == [number for number in numbers if number > 1]
    assert state.completed == eligible(state.trials.values())
    assert state.unfinished == {
        number for number, each in state.trials.items() if each.result.outcome is Outcome.RUNNING
    }


def at(selected: tuple[TrialRecord, ...] | TrialRecord | None) -> tuple[TrialRecord | None, ...]:
    return selected if isinstance(selected, tuple) else (selected,)


def test_of_thousands_only_the_front_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in trials that are compared when one more completes."""
    rng = Random(0)
    known = [trial(n, ne=0.7 + rng.random() / 10, flops=10 ** (4 + 3 * rng.random())) for n in range(2000)]
    state = StudyState(
        judged([]), [each.with_job(fingerprint=str(each.number)) for each in known], averages=True
    )
    picked = state.selection
    on_fronts = sum(len(front) for front in (picked.front, picked.runners_up, picked.by_table_bytes))
    compared = 0

    def counted(each: TrialRecord) -> float:
        nonlocal compared
        compared += 1
        return ne_of(each)

    monkeypatch.setattr("search.selection.ne_of", counted)
    state.note(trial(2000, ne=0.7001, flops=1e5).with_job(fingerprint="new"))
    assert state.selection.front
    assert 0 < compared <= 4 * (on_fronts + 2) < 400
