"""Predicted against measured, and throughput against depth: points of the record, no others."""

from __future__ import annotations

import pytest
from records import bare, judged, study

from dashboards.figures.curves import depth_figure
from dashboards.figures.memory import predictions_figure
from dashboards.plans import overall_accuracy, share
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Attempt, Measurements, Outcome, TrialRecord

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
    return record.replace(attempts=(attempt,)).with_result(measured=Measurements(examples_per_second=speed))


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
    figure = predictions_figure(record)
    whole = overall_accuracy(record)
    points = {
        x: [trace for trace in figure.data if trace.xaxis == x and trace.customdata] for x in ("x", "x2")
    }
    measured = [hover for trace in points["x"] for hover in trace.hovertext if "measured" in hover]
    steps = [hover for trace in points["x2"] for hover in trace.hovertext]
    assert (len(measured), len(steps)) == (whole.peak.count, whole.step.count)
    assert f"{share(whole.peak.median)} in memory" in figure.layout.title.text
    assert f"{share(whole.step.median)} in step time" in figure.layout.title.text
    assert {trace.name for trace in points["x2"]} == {"dp", "zero1", "hsdp+cpu_offload"}
    assert all("(+100 %)" in hover for hover in steps)


def test_what_ran_out_of_memory_is_open_at_what_it_needed(record: StudyRecord) -> None:
    figure = predictions_figure(record)
    dp = next(trace for trace in figure.data if trace.name == "dp" and trace.xaxis == "x")
    assert list(dp.marker.symbol) == ["circle", "circle", "circle-open"]
    assert (dp.customdata[-1], dp.x[-1], dp.y[-1]) == (3, 5, 7)
    assert "ran out of memory" in dp.hovertext[-1]
    assert "Predictions are off by" in figure.layout.title.text
    identity = figure.data[0]
    assert list(identity.x) == list(identity.y)


def test_throughput_by_depth_and_technique_and_why_there_is_none() -> None:
    speeds = [("dp", 1, 100.0), ("dp", 1, 200.0), ("dp", 1, 150.0), ("dp", 4, 75.0), ("zero1", 4, 50.0)]
    trials = [
        trained(number, name, depth=depth, speed=speed) for number, (name, depth, speed) in enumerate(speeds)
    ]
    shared = trained(9, "dp", depth=8).with_origin(reused_from=0)
    figure = depth_figure(judged([*trials, shared]))
    medians = {trace.name: (trace.x, trace.y) for trace in figure.data if trace.mode == "lines"}
    assert medians == {"dp": ((1, 4), (150.0, 75.0)), "zero1": ((4,), (50.0,))}
    assert figure.layout.xaxis.tickvals == (1, 4)
    assert figure.layout.title.text == "With dp, 4 layers train at 0.50x the speed of 1"
    assert sum(len(trace.x) for trace in figure.data if trace.mode == "markers") == 5
    record = study()  # without attempts
    assert predictions_figure(record).layout.title.subtitle.text.startswith("Shown as soon")
    assert depth_figure(record).layout.title.subtitle.text.startswith("Shown as soon as")
