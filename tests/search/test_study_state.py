"""How a study stands: the time that counts against its budget, and who has won so far."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from records import bare, judged

from search.study_state import StudyState
from trials.record import Outcome, TrialKind, TrialRecord

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


def test_what_is_cut_short_or_shared_takes_no_time() -> None:
    cut = trial(0, seconds=None, outcome=Outcome.INTERRUPTED)
    shared = trial(1, start=5, seconds=0.0, reused_from=2)
    unplanned = trial(2).with_origin(started_at=None).with_result(seconds=0.0)
    assert standing(cut, shared, unplanned).elapsed_seconds() == 0.0


def test_what_runs_counts_until_now() -> None:
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
