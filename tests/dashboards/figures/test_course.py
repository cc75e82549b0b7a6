"""What ran when, and what the study had found by then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import bare, judged, study

from dashboards.figures.course import (
    gain_figure,
    hypervolume,
    runs_of,
    stage_of,
    stretches,
    timeline_figure,
)
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Attempt, Outcome, StudyTrial, TrialKind, TrialRecord

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def ran(number: int, start: float, seconds: float, ne: float = 0.79, **facts) -> TrialRecord:
    started = (BEGIN + timedelta(seconds=start)).isoformat()
    facts = {"flops": 10.0 ** (number % 3 + 5), **facts}
    return bare(number, ne=ne, started_at=started, seconds=seconds, **facts)


def searched(**changes) -> StudyRecord:
    """A baseline, two candidates side by side, a tuned one after a night, an average and a retraining."""
    trials = [
        ran(0, 0, 10, 0.80, kind=TrialKind.BASELINE),
        ran(1, 10, 20, 0.79),
        ran(2, 12, 30, 0.795),
        ran(3, 10_000, 10, 0.78, tuned_from=1),
        ran(4, 10_012, 0, 0.775, kind=TrialKind.AVERAGE, members=(1, 3)),
    ]
    again = ran(0, 10_013, 5, kind=TrialKind.RETRAINING, of=3)
    return judged(trials, retrainings=(again,), **changes)


def test_the_clock_leaves_out_what_nothing_ran_in() -> None:
    runs, left_out_seconds = runs_of(searched())
    assert [(run.trial.number, run.start, run.end) for run in runs[:3]] == [
        (0, 0, 10),
        (1, 10, 30),
        (2, 12, 42),
    ]
    assert left_out_seconds == pytest.approx(10_000 - 42)
    assert runs[3].start == pytest.approx(42)
    assert [stage for stage, _, _ in stretches(runs)] == [
        "baseline",
        "search",
        "tuning",
        "averages",
        "confirmation",
    ]


def test_every_trial_has_its_stage_and_shared_results_take_no_time() -> None:
    assert stage_of(bare(1, ne=0.7, flops=1.0, promoted_from=0)) == "all rows"
    removed = bare(1, ne=0.7, flops=1.0, kind=TrialKind.RETRAINING, removed="layer0")
    assert stage_of(removed) == "ablation"
    assert stage_of(bare(1, ne=0.7, flops=1.0, kind=TrialKind.DISTILLED)) == "averages"
    shared = ran(5, 50, 20).with_origin(reused_from=1)
    assert 5 not in [run.trial.number for run in runs_of(searched().replace(trials=(shared,)))[0]]


def test_best_ne_and_hypervolume_only_improve() -> None:
    figure = gain_figure(searched())
    lowest, volume = figure.data
    assert lowest.customdata == (1, 2, 3, 4)
    assert list(volume.y) == sorted(volume.y)
    assert volume.y[-1] > volume.y[0] > 0
    assert list(lowest.y) == [0.79, 0.79, 0.78, 0.775]
    assert volume.y[-1] == pytest.approx(100)
    assert "Pauses of 2 h 46 min in all are left out." in figure.layout.title.subtitle.text
    assert {note.text for note in figure.layout.annotations} >= {"baseline", "search", "tuning"}


Point = tuple[float, float]
PLACES = st.tuples(st.floats(0, 10), st.floats(0, 10))


@given(st.lists(PLACES, max_size=12), PLACES)
def test_hypervolume_is_the_area_of_steps_and_a_further_point_never_makes_it_smaller(
    points: list[Point], point: Point
) -> None:
    assert hypervolume([(1, 2), (2, 1), (2.5, 1.5)], (3, 3)) == pytest.approx(2 * 1 + 1 * 1)
    assert hypervolume([(3, 1), (1, 3)], (3, 3)) == 0
    reference = (10.0, 10.0)
    before = hypervolume(points, reference)
    assert 0 <= before <= 100 + 1e-9
    assert hypervolume([*points, point], reference) >= before - 1e-9


def test_side_by_side_are_places_of_their_own() -> None:
    figure = timeline_figure(searched())
    places = {
        hover.split(" (")[0]: place
        for trace in figure.data
        for hover, place in zip(trace.hovertext, trace.y, strict=True)
    }
    assert [places[f"trial {number}"] for number in range(4)] == [0, 0, 1, 0]
    assert figure.layout.yaxis.ticktext == ("place 1", "place 2")
    assert "2 side by side at most" in figure.layout.title.text


def test_attempts_follow_one_another_and_climbs_are_counted() -> None:
    attempts = (
        Attempt(strategy="dp", outcome=Outcome.OUT_OF_MEMORY, predicted_bytes=1, seconds=4.0),
        Attempt(strategy="zero1", outcome=Outcome.COMPLETED, predicted_bytes=1, seconds=15.0),
    )
    record = judged([ran(1, 0, 20).replace(attempts=attempts)])
    figure = timeline_figure(record)
    drawn = [(trace.name, trace.base[0] * 60, trace.x[0] * 60) for trace in figure.data]
    assert drawn == [("dp", 0, pytest.approx(4)), ("zero1", pytest.approx(4), pytest.approx(15))]
    assert figure.layout.title.text.startswith("1 training, one after another")
    assert "once one ran out of memory and climbed the ladder" in figure.layout.title.text
    shapes = {trace.name: trace.marker.pattern.shape for trace in figure.data}
    assert shapes == {"dp": "x", "zero1": ""}
    assert all(trace.showlegend for trace in figure.data)


def test_what_is_still_at_work_has_a_bar_and_studies_in_which_nothing_ran_say_so() -> None:
    for draw in (gain_figure, timeline_figure):
        assert draw(judged([])).layout.title.subtitle.text.startswith("Shown as soon as")
    record = study(1, finished=False)
    hovers = [hover for trace in timeline_figure(record).data for hover in trace.hovertext]
    assert any(": running<br>" in hover or "<br>running<br>" in hover for hover in hovers)
    assert len(hovers) == len(record.trials)


def test_the_gain_has_results_that_were_taken_over_when_the_study_had_them() -> None:
    known = ran(
        1, 20, 400, ne=0.75, reused_from_study=StudyTrial(directory="runs/earlier", study="a", trial=7)
    )
    record = searched()
    trials = tuple(known if trial.number == 1 else trial for trial in record.trials)
    record = record.replace(trials=trials)
    figure = gain_figure(record)
    assert (figure.data[0].customdata[0], figure.data[0].y[0]) == (1, 0.75)
    assert "came after 20 s" in figure.layout.title.text
    assert 1 not in [run.trial.number for run in runs_of(record)[0]], "nothing ran"
