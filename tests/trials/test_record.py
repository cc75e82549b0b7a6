from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import judged, metrics, study

from trials.record import CurvePoint, StudyRecord, relative_ne_curve, relative_ne_percent


def curve(*points: tuple[int, float]) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            examples=examples, epoch=0, train_loss=0.1, learning_rate=0.1, seconds=1.0, validation=metrics(ne)
        )
        for examples, ne in points
    )


def test_equal_numbers_of_examples_are_compared_as_they_are() -> None:
    own, baseline = curve((10, 0.9), (20, 0.8)), curve((10, 1.0), (20, 0.8))
    assert relative_ne_curve(own, baseline) == ((10, pytest.approx(-10.0)), (20, 0.0))


def test_between_two_evaluations_the_baseline_is_interpolated() -> None:
    assert relative_ne_curve(curve((15, 0.9)), curve((10, 1.0), (20, 0.8))) == ((15, pytest.approx(0.0)),)


def test_outside_the_baselines_range_there_is_no_value() -> None:
    own = curve((5, 0.9), (10, 0.9), (21, 0.9))
    assert [examples for examples, _ in relative_ne_curve(own, curve((10, 1.0), (20, 0.8)))] == [10]
    assert relative_ne_curve(own, ()) == ()
    assert relative_ne_curve((), own) == ()


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


@given(points)
def test_the_baseline_against_itself_is_zero(own: list) -> None:
    found = relative_ne_curve(curve(*own), curve(*own))
    assert found == tuple((examples, 0.0) for examples, _ in own)


def test_records_survive_the_way_through_json() -> None:
    record = study(finished=False)
    assert StudyRecord.model_validate_json(record.model_dump_json()) == record


def test_what_is_not_a_number_is_read_back() -> None:
    record = study(3)
    last = record.trials[-1].replace(validation=metrics(float("nan")))
    again = StudyRecord.model_validate_json(judged([last], finished=False).model_dump_json())
    assert repr(again.trials) == repr((last,))
