"""What the figures draw; the pictures themselves are looked at in a browser."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import FLOOR, judged, metrics, study, trial

from dashboards.figures import FIGURES
from dashboards.figures.course import time_figure
from dashboards.figures.curves import curves_figure
from dashboards.figures.plane import front_figure, table_bytes_figure
from dashboards.figures.style import frame
from dashboards.rows import table_bytes_differ
from search.selection import eligible, table_bytes_front_of
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import Measurements, Outcome, TrialKind


def names(figure) -> list[str]:
    return [trace.name for trace in figure.data]


@given(
    st.lists(st.floats(min_value=0.5, max_value=1.5), min_size=1, max_size=30),
    st.lists(st.floats(min_value=0.5, max_value=1.5), max_size=3),
)
def test_frame_holds_the_best_and_what_it_must(values: list[float], always: list[float]) -> None:
    found = frame(values, always)
    assert found.low < min([*values, *always])
    assert found.high > max(always, default=min(values))
    assert found.above == sum(value > found.high for value in values)
    assert frame([0.780, 0.781, 0.782, 0.783, 0.784, 3.0]).high < 0.79  # one bad value presses nothing flat


def named(figure, name: str):
    """The trace of this name, or the one that is marked with it."""
    return next(trace for trace in figure.data if trace.name == name or trace.text == (name,))


def candidates(figure) -> dict[int, tuple[float, float]]:
    """Price and NE of each candidate in the plane, by number."""
    return {
        number: (price, ne)
        for trace in figure.data
        if trace.mode == "markers" and not trace.name.startswith("winners")
        for number, price, ne in zip(trace.customdata, trace.x, trace.y, strict=True)
    }


def test_front_has_the_records_verdicts() -> None:
    record = study()
    figure = front_figure(record)
    assert named(figure, "Pareto front").customdata == record.front
    assert [trace.text[0] for trace in figure.data if trace.text] == ["baseline", "knee", "best"]
    for mark in ("best", "knee", "baseline"):
        trial = record.trial(getattr(record, mark))
        trace = named(figure, mark)
        assert (trace.customdata, trace.x, trace.y) == (
            (trial.number,),
            (trial.job.flops,),
            (trial.result.validation.ne,),
        )
    assert "0.00 % to the baseline" in named(figure, "baseline").hovertext[0]
    assert "below the baseline" in figure.layout.title.text
    assert any(shape.y0 == FLOOR for shape in figure.layout.shapes)
    assert any("floor" in note.text for note in figure.layout.annotations)


def test_front_leaves_out_what_has_no_place_in_the_plane() -> None:
    record = study(finished=False)
    with_result = (Outcome.COMPLETED, Outcome.STOPPED)
    expected = {each.number for each in record.candidates if each.result.outcome in with_result}
    assert set(candidates(front_figure(record))) == expected


def with_tables(*sizes: int) -> StudyRecord:
    """A study whose trials have tables of these sizes in turn, and the front that follows."""
    record = study()
    trials = [each.with_job(table_bytes=sizes[each.number % len(sizes)]) for each in record.trials]
    field = [each for each in trials if each.kind is TrialKind.CANDIDATE]
    front = table_bytes_front_of(eligible(field))
    return record.replace(trials=tuple(trials), table_bytes_front=tuple(each.number for each in front))


def test_table_bytes_have_the_records_front_and_sizes_at_the_axis() -> None:
    record = with_tables(3 * 2**20, 2**20, 40 * 2**20)
    figure = table_bytes_figure(record)
    front = named(figure, "Pareto front")
    assert front.customdata == record.table_bytes_front
    assert len(front.x) > 1
    assert list(front.x) == sorted(set(front.x))
    points = candidates(figure)
    for number, point in points.items():
        trial = record.trial(number)
        assert point == (trial.job.table_bytes, trial.result.validation.ne)
    assert set(points) == set(candidates(front_figure(record)))
    assert [trace.text[0] for trace in figure.data if trace.text] == ["baseline", "best"]
    assert figure.layout.xaxis.ticktext[:3] == ("1 MiB", "2 MiB", "4 MiB")
    assert figure.layout.xaxis.tickvals[-1] == 64 * 2**20
    hovers = [text for trace in figure.data for text in trace.hovertext]
    assert all("MiB of embedding tables" in hover and "FLOPs" in hover for hover in hovers)
    assert figure.layout.title.text.startswith("Tables of 1.0 MiB in place of")
    assert " raise NE by 0." in figure.layout.title.text


def test_equal_tables_are_no_figure() -> None:
    assert not table_bytes_differ(with_tables(1000))
    assert not table_bytes_differ(judged([]))
    assert table_bytes_figure(with_tables(1000)) is None
    record = with_tables(1024, 2048)
    smallest = next(number for number in record.front if record.trial(number).job.table_bytes == 1024)
    alone = table_bytes_figure(record.replace(table_bytes_front=(smallest,)))
    assert alone.layout.title.text == "The lowest NE needs no larger tables than 1.0 KiB"


def test_a_far_floor_is_said_and_does_not_stretch_the_frame() -> None:
    record = study()
    far = record.log.replace(ne_floor={"validation": 0.2})
    figure = front_figure(record.replace(log=far))
    assert figure.layout.yaxis.range[0] > 0.7
    assert any("below this frame" in note.text for note in figure.layout.annotations)


def test_curves_are_relative_at_the_same_numbers_of_examples() -> None:
    record = study()
    baseline = record.trial(record.baseline)
    figure = curves_figure(record)
    assert names(figure)[:2] == ["candidates", "Pareto front"]
    assert {name.split(" (")[0] for name in names(figure)[2:]} == {"best", "knee"}
    drawn: dict[int, list[tuple[int, float]]] = {}
    for trace in figure.data:
        for examples, percent, hover in zip(trace.x, trace.y, trace.hovertext, strict=True):
            if hover:
                number = int(hover.split("<br>")[0].removeprefix("trial ").partition(":")[0])
                drawn.setdefault(number, []).append((examples, percent))
    assert set(drawn) == {each.number for each in record.field if each.result.curve and not each.shared}
    for number, points in drawn.items():
        for (examples, percent), point, other in zip(
            points, record.trial(number).result.curve, baseline.result.curve, strict=False
        ):
            assert examples == point.examples == other.examples
            assert percent == pytest.approx(relative_ne_percent(point.validation.ne, other.validation.ne))


def test_time_parts_sum_to_the_wall_clock() -> None:
    record = study()
    figure = time_figure(record)
    expected = sum(each.result.seconds for each in record.trials if each.origin.reused_from is None)
    assert sum(sum(trace.y) for trace in figure.data) == pytest.approx(expected)
    assert all(seconds >= 0 for trace in figure.data for seconds in trace.y)
    assert names(figure) == ["training", "evaluation", "all else"]
    clocks_disagree = Measurements(train_seconds=2.0, evaluate_seconds=3.0)
    odd = trial(0, Random(0)).with_result(seconds=1.0, measured=clocks_disagree)
    assert [trace.y for trace in time_figure(judged([odd])).data] == [(1.0,), (0.0,), (0.0,)]


@pytest.mark.parametrize(
    "record",
    [
        judged([]),
        judged([], finished=False),
        judged([trial(number, Random(number), outcome=Outcome.FAILED) for number in range(3)]),
        judged([trial(0, Random(0))]),
        judged([trial(0, Random(0), kind=TrialKind.BASELINE)]),
        study(1, finished=False),
    ],
    ids=["empty", "just started", "all failed", "no baseline", "baseline alone", "one running"],
)
def test_figures_of_studies_with_little_in_them(record) -> None:
    for draw in FIGURES.values():
        figure = draw(record)
        if figure is not None:
            assert figure.layout.title.text
            assert figure.data or figure.layout.title.subtitle.text


def test_values_that_are_no_numbers_are_not_drawn() -> None:
    broken = trial(1, Random(0)).with_result(validation=metrics(math.nan))
    assert not front_figure(judged([broken]).replace(front=(1,), best=1)).data


def test_early_values_do_not_set_the_frame_of_the_curves() -> None:
    record = study(6)
    best = record.trial(record.best)
    first = best.result.curve[0].replace(validation=metrics(0.4))
    odd = best.with_result(curve=(first, *best.result.curve[1:]))
    trials = tuple(odd if each.number == best.number else each for each in record.trials)
    calm, wild = curves_figure(record), curves_figure(record.replace(trials=trials))
    assert wild.layout.yaxis.range == calm.layout.yaxis.range
    assert "second half" in wild.layout.title.subtitle.text
