"""Predicted against measured, and throughput against depth: points of the record, no others."""

from __future__ import annotations

import pytest
from records import bare, judged, study

from dashboards.accuracy import accuracy
from dashboards.figures.memory.depth import depth_figure, depth_info
from dashboards.figures.memory.predictions import predictions_figure, predictions_info
from trials.record import Attempt, Measured, Outcome, TrialRecord
from trials.study_record import StudyRecord

MIB = 2**20


def trained(number: int, technique: str, *, depth: int = 1, speed: float = 100.0) -> TrialRecord:
    attempt = Attempt(
        strategy=technique,
        outcome=Outcome.COMPLETED,
        predicted_bytes=4 * MIB,
        measured_bytes=4 * MIB + number * MIB // 10,
        predicted_step_seconds=0.1,
        measured_step_seconds=0.2,
    )
    layers = [{"modules": [{"kind": "linear"}]}] * depth
    record = bare(number, ne=0.8, flops=1e6, model={"family": "dhen", "layers": layers})
    return record.replace(attempts=(attempt,)).with_result(measured=Measured(examples_per_second=speed))


def ran_out(number: int) -> TrialRecord:
    short = Attempt(
        strategy="dp",
        outcome=Outcome.OUT_OF_MEMORY,
        predicted_bytes=5 * MIB,
        needed_bytes=7 * MIB,
        limit_bytes=6 * MIB,
    )
    last = trained(number, "zero1")
    return last.replace(attempts=(short, *last.attempts))


@pytest.fixture
def record() -> StudyRecord:
    return judged([trained(1, "dp"), trained(2, "dp"), ran_out(3), trained(4, "hsdp+cpu_offload")])


def test_points_are_those_that_the_table_counts(record: StudyRecord) -> None:
    info = predictions_info(record)
    whole = accuracy(record)[-1]
    measured = [point for point in info.memory if not point.ran_out]
    assert (len(measured), len(info.step)) == (whole.peak.count, whole.step.count)
    assert (info.memory_off, info.step_off) == (whole.peak.median, whole.step.median)
    assert {point.technique for point in info.step} == {"dp", "zero1", "hsdp+cpu_offload"}
    assert all(point.error_percent == pytest.approx(100) for point in info.step)


def test_what_ran_out_of_memory_is_open_at_what_it_needed(record: StudyRecord) -> None:
    info = predictions_info(record)
    (short,) = [point for point in info.memory if point.ran_out]
    assert (short.trial, short.technique, short.measured) == (3, "dp", 7 * MIB)
    figure = predictions_figure(info)
    dp = next(trace for trace in figure.data if trace.name == "dp" and trace.xaxis == "x")
    assert list(dp.marker.symbol) == ["circle", "circle", "circle-open"]
    assert (dp.x[-1], dp.y[-1]) == (5, 7)
    assert "Predictions are off by" in figure.layout.title.text
    identity = figure.data[0]
    assert list(identity.x) == list(identity.y)


def test_steps_alone_are_one_panel() -> None:
    uncounted = trained(1, "dp")
    attempt = uncounted.attempts[0].replace(measured_bytes=None)
    info = predictions_info(judged([uncounted.replace(attempts=(attempt,))]))
    assert (info.memory, len(info.step)) == ((), 1)
    figure = predictions_figure(info)
    assert {trace.xaxis for trace in figure.data} == {"x"}
    assert figure.layout.xaxis.title.text == "predicted milliseconds per step"


def test_throughput_by_depth_and_technique() -> None:
    speeds = [("dp", 1, 100.0), ("dp", 1, 200.0), ("dp", 1, 150.0), ("dp", 4, 75.0), ("zero1", 4, 50.0)]
    trials = [
        trained(number, name, depth=depth, speed=speed) for number, (name, depth, speed) in enumerate(speeds)
    ]
    shared = trained(9, "dp", depth=8).with_origin(reused_from=0)
    info = depth_info(judged([*trials, shared]))
    assert [(line.technique, line.medians) for line in info.lines] == [
        ("dp", ((1, 150.0), (4, 75.0))),
        ("zero1", ((4, 50.0),)),
    ]
    assert info.depths == (1, 4)
    figure = depth_figure(info)
    assert figure.layout.title.text == "With dp, 4 layers train at 0.50x the speed of 1"
    assert sum(len(trace.x) for trace in figure.data if trace.mode == "markers") == 5


def test_studies_without_attempts_say_why() -> None:
    record = study()
    assert predictions_figure(predictions_info(record)).layout.title.subtitle.text.startswith("Shown as soon")
    assert depth_figure(depth_info(record)).layout.title.subtitle.text.startswith("Shown as soon as")
