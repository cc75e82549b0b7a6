"""Where on each axis the good candidates lie: what the figure shows, and that it draws it."""

from __future__ import annotations

import math
from random import Random

import pytest
from records import judged, metrics, study, trial

from dashboards.figures.axes import AxesInfo, axes_figure, axes_info
from trials.ordered_axis import OrderedAxis
from trials.record import Outcome, TrialKind
from trials.study_record import relative_ne_percent

LENGTHS = OrderedAxis(name="embedding_dim", part="model", key="embedding_dim", values=(8, 16, 32))
RATES = OrderedAxis(
    name="training.learning_rate", part="training", key="learning_rate", low=0.0001, high=0.01, log=True
)
OUTS = tuple(
    OrderedAxis(name=f"layer{n}.out_embeddings", part="layer", key="out_embeddings", layer=n, values=(4, 8))
    for n in range(4)
)
NOBODYS = OrderedAxis(
    name="layer0.pnn.mlp", part="layer", key="mlp", layer=0, kind="pnn", values=("64", "128-64")
)
AXES = (LENGTHS, RATES, *OUTS, NOBODYS)


@pytest.fixture(scope="module")
def info() -> AxesInfo:
    return axes_info(study(axes=AXES))


def test_candidates_with_a_result_stand_at_their_values(info: AxesInfo) -> None:
    record = study()
    baseline = record.trial(record.baseline).result.validation.ne
    lengths = info.panels[0]
    with_result = (Outcome.COMPLETED, Outcome.STOPPED)
    expected = {t.number for t in record.candidates if t.result.outcome in with_result}
    assert {point.row.trial.number for point in lengths.points} == expected
    for point in lengths.points:
        of = record.trial(point.row.trial.number)
        assert point.value == of.job.model["embedding_dim"] == (8, 16, 32)[int(point.x)]
        assert point.relative_percent == pytest.approx(relative_ne_percent(of.result.validation.ne, baseline))
    marked = {point.row.trial.number for point in lengths.points if point.on_front}
    assert marked == set(record.front)


def test_layers_share_a_panel_and_an_axis_that_nobody_has_has_none(info: AxesInfo) -> None:
    assert [panel.name for panel in info.panels] == [
        "embedding_dim",
        "training.learning_rate",
        "layer.out_embeddings",
    ]
    numbers = [point.row.trial.number for point in info.panels[2].points]
    assert len(numbers) == len(set(numbers))  # all layers have 8 here: one point for each candidate


def test_the_ends_of_a_panel_are_those_of_the_space(info: AxesInfo) -> None:
    lengths, rates, _ = info.panels
    assert (lengths.low, lengths.high, lengths.labels) == (0, 2, ("8", "16", "32"))
    assert (rates.low, rates.high, rates.labels, rates.log) == (0.0001, 0.01, (), True)


def test_ends_baseline_and_front_are_drawn(info: AxesInfo) -> None:
    figure = axes_figure(info)
    for x, panel in zip(("x", "x2", "x3"), info.panels, strict=True):
        vertical = {shape.x0 for shape in figure.layout.shapes if shape.xref == x and shape.x0 == shape.x1}
        assert vertical == {panel.low, panel.high}
        baseline = [shape for shape in figure.layout.shapes if shape.xref == f"{x} domain"]
        assert [(shape.y0, shape.y1) for shape in baseline] == [(0, 0)]
    axes = [figure.layout.xaxis, figure.layout.xaxis2, figure.layout.xaxis3]
    assert [axis.type for axis in axes] == ["linear", "log", "linear"]
    assert axes[0].ticktext == ("8", "16", "32")
    assert [trace.name for trace in figure.data] == ["other candidates", "on the front"] * 3
    assert [trace.showlegend for trace in figure.data] == [True, True, False, False, False, False]
    drawn = {trace.xaxis: 0 for trace in figure.data}
    for trace in figure.data:
        drawn[trace.xaxis] += len(trace.x)
    assert list(drawn.values()) == [len(panel.points) for panel in info.panels]
    hovers = [hover for trace in figure.data for hover in trace.hovertext]
    assert any("embedding_dim 16" in hover and "to the baseline" in hover for hover in hovers)


def test_one_very_bad_candidate_does_not_press_the_rest_flat() -> None:
    record = study(axes=AXES)
    off_front = next(t for t in record.candidates if t.result.validation and t.number not in record.front)
    bad = off_front.with_result(validation=metrics(3.0))
    trials = tuple(bad if t.number == bad.number else t for t in record.trials)
    found = axes_info(record.replace(trials=trials)).frame
    assert found is not None
    assert found.above >= 1
    assert found.high < 20
    assert (
        "above these frames"
        in axes_figure(axes_info(record.replace(trials=trials))).layout.title.subtitle.text
    )


@pytest.mark.parametrize(
    "record",
    [
        judged([], axes=AXES),
        judged([trial(0, Random(0), kind=TrialKind.BASELINE)], axes=AXES),
        judged([trial(0, Random(0))], axes=AXES),
        judged([trial(1, Random(0)).with_result(validation=metrics(math.nan))], axes=AXES),
    ],
    ids=["empty", "baseline alone", "no baseline", "no number"],
)
def test_without_anything_to_compare_the_figure_says_so(record) -> None:
    figure = axes_figure(axes_info(record))
    assert not figure.data
    assert figure.layout.title.subtitle.text.startswith("Shown as soon as")
