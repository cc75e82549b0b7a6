"""What is known of a trial: a nested value that changes by its parts; and curves against the baseline's."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from records import metrics, spaced_study, study

from dhen.values import compact
from trials.records.study_record import StudyRecord, relative_ne_curve, relative_ne_percent
from trials.records.trial_record import (
    MOST_EXAMPLES,
    Attempt,
    Curve,
    CurvePoint,
    JobSummary,
    Measurements,
    Metrics,
    Origin,
    Outcome,
    PlanSummary,
    Result,
    StudyTrial,
    TrialKind,
    TrialPlan,
    TrialRecord,
)


def curve(*points: tuple[int, float]) -> Curve:
    return Curve(
        CurvePoint(
            examples=examples, epoch=0, train_loss=0.1, learning_rate=0.1, seconds=1.0, validation=metrics(ne)
        )
        for examples, ne in points
    )


def test_a_curve_is_compared_with_the_baselines_within_its_range_interpolated() -> None:
    own, baseline = curve((5, 0.9), (10, 0.9), (15, 0.9), (20, 0.8), (21, 0.9)), curve((10, 1.0), (20, 0.8))
    assert relative_ne_curve(own, baseline) == (
        (10, pytest.approx(-10.0)),
        (15, pytest.approx(0.0)),
        (20, 0.0),
    )
    assert relative_ne_curve(own, Curve()) == relative_ne_curve(Curve(), own) == ()


points = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0.5, 1.5)),
    min_size=1,
    max_size=8,
    unique_by=lambda point: point[0],
).map(sorted)


@given(points, points)
def test_values_lie_between_those_against_the_baselines_extremes(own: list, baseline: list) -> None:
    nes = [ne for _, ne in baseline]
    mine = dict(own)
    for examples, percent in relative_ne_curve(curve(*own), curve(*baseline)):
        low, high = (relative_ne_percent(mine[examples], ne) for ne in (max(nes), min(nes)))
        assert low - 1e-9 <= percent <= high + 1e-9


def test_records_survive_the_way_through_json() -> None:
    record = study(finished=False)
    assert StudyRecord.model_validate_json(record.model_dump_json()) == record
    last = record.trials[-1].with_result(validation=metrics(float("nan")))
    again = StudyRecord.model_validate_json(record.replace(trials=(last,)).model_dump_json())
    assert repr(again.trials) == repr((last,))


numbers = st.floats()
"""Infinite ones, and what is no number, too."""
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, MOST_EXAMPLES)
qualities = st.builds(
    Metrics, ne=numbers, log_loss=numbers, auc=numbers, calibration=numbers, examples=counts
)
curve_points = st.builds(
    CurvePoint,
    examples=counts,
    epoch=finite,
    train_loss=numbers,
    learning_rate=finite,
    seconds=finite,
    validation=qualities,
    averaged=...,
    clipped=st.none() | st.floats(0.0, 1.0),
)
plan_summaries = st.builds(
    PlanSummary,
    strategy=...,
    fits=...,
    examples_per_rank=...,
    memory_bytes=st.dictionaries(st.text(), st.integers()),
    step_seconds=st.dictionaries(st.text(), finite),
)
maybe = st.none() | finite
records = st.builds(
    TrialRecord,
    number=...,
    kind=...,
    point=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | finite | st.text()),
    origin=st.builds(Origin, reused_from=..., reused_from_study=..., members=..., sampler_notes=...),
    job=st.builds(JobSummary, fingerprint=..., seed=..., flops=maybe, weights_bytes=...),
    plan=st.builds(TrialPlan, technique=..., memory_excess=maybe, summary=st.none() | plan_summaries),
    result=st.builds(
        Result,
        outcome=...,
        error=...,
        curve=st.lists(curve_points, max_size=3).map(tuple),
        validation=st.none() | qualities,
        test=st.none() | qualities,
        technique=...,
        measured=st.builds(Measurements, examples_per_second=maybe, step_ms=maybe, peak_memory_bytes=...),
        seconds=maybe,
    ),
    attempts=st.lists(
        st.builds(Attempt, strategy=..., outcome=..., predicted_bytes=..., seconds=maybe), max_size=3
    ).map(tuple),
)


KIB_OF_A_RECORD = 9.0
"""What a record of `records.spaced_study` with ten evaluations may take, in KiB; it is 6.0. As it is
read it takes 14."""


def test_a_record_that_is_kept_takes_little_memory() -> None:
    texts = [trial.model_dump_json() for trial in spaced_study(220).trials]
    tracemalloc.start()
    try:
        kept = [compact(TrialRecord.model_validate_json(text)) for text in texts]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / 1024 / len(kept) < KIB_OF_A_RECORD


@given(records)
@settings(max_examples=25)
def test_a_record_survives_the_way_through_json_whatever_is_in_it(record: TrialRecord) -> None:
    again = TrialRecord.model_validate_json(record.model_dump_json())
    assert repr(again) == repr(record)  # what is no number is not equal to itself
    json.loads(record.model_dump_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


CHANGES = {"with_result": "result", "with_job": "job", "with_plan": "plan", "with_origin": "origin"}
NEW: dict[str, dict[str, Any]] = {
    "with_result": {"outcome": Outcome.FAILED, "error": "broken"},
    "with_job": {"flops": 7.0, "seed": 3},
    "with_plan": {"technique": "zero1", "peak_bytes": 9},
    "with_origin": {"tuned_from": 2, "members": (1, 2)},
}
CANDIDATE = TrialRecord(number=1, kind=TrialKind.CANDIDATE)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_part_changes_these_fields_and_no_other_and_refuses_other_names(change: str) -> None:
    """Names of another part, of the record itself, and misspelt ones, for which the nearest is named."""
    before = study().trials[-1]
    after, part = getattr(before, change)(**NEW[change]), CHANGES[change]
    assert _fields(getattr(after, part)) == _fields(getattr(before, part)) | NEW[change]
    assert _fields(after) == _fields(before) | {part: getattr(after, part)}
    parts = {part: set(type(getattr(CANDIDATE, part)).model_fields) for part in CHANGES.values()}
    own = parts[CHANGES[change]]
    others = set().union(*parts.values()) | set(TrialRecord.model_fields)
    for name in sorted(others - own):
        with pytest.raises(TypeError, match=repr(name)):
            getattr(CANDIDATE, change)(**{name: None})
    for name in sorted(own):
        with pytest.raises(TypeError, match=f"Did you mean '{name}'"):
            getattr(CANDIDATE, change)(**{f"{name}x": None})


def test_a_result_that_is_taken_over_took_no_time_and_its_look_at_test_is_not_taken() -> None:
    result = study().trial(study().best).result
    assert result.test is not None
    assert result.seconds
    taken = result.taken_over()
    assert _fields(taken) == _fields(result) | {"test": None, "seconds": 0.0}
    assert taken.taken_over() == taken


def test_the_owner_of_a_result_is_the_trial_of_this_study_that_was_trained() -> None:
    elsewhere = StudyTrial(study="other", directory="/runs/other", trial=5)
    here = CANDIDATE.with_origin(reused_from=0)
    there = CANDIDATE.with_origin(reused_from_study=elsewhere)
    assert (CANDIDATE.owner, CANDIDATE.shared) == (1, False)
    assert (here.owner, here.shared) == (0, True)  # the first trial has number 0
    assert (there.owner, there.shared) == (1, True)  # its weights are copied under its own number
    assert CANDIDATE.with_origin(tuned_from=0, promoted_from=0).owner == 1


def test_a_plan_without_items_has_no_peak_and_what_is_hidden_is_taken_off() -> None:
    bare_plan = PlanSummary(strategy=None, fits=False, examples_per_rank=1)
    assert (bare_plan.peak_bytes, bare_plan.whole_step_seconds) == (None, None)
    items = bare_plan.replace(
        memory_bytes={"a": 1, "b": 2}, step_seconds={"forward": 2.0, "all_reduce": 1.0, "hidden": 0.5}
    )
    assert items.peak_bytes == 3
    assert items.whole_step_seconds is not None
    assert math.isclose(items.whole_step_seconds, 2.5)


def _fields(value: BaseModel) -> dict[str, Any]:
    """One level deep."""
    return dict(value)


def test_a_study_that_was_asked_for_its_candidates_can_be_changed_written_and_compared() -> None:
    """The property is cached beside the fields, and is none of them."""
    asked, fresh = study(), study()
    assert len(asked.candidates) > 0
    assert asked == fresh
    assert asked.model_dump_json() == fresh.model_dump_json()
    shorter = asked.replace(trials=asked.trials[:3])
    assert shorter.candidates == fresh.replace(trials=fresh.trials[:3]).candidates
