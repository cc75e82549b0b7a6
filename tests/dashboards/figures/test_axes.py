"""Where on each axis the good candidates lie: what the figure draws."""

from __future__ import annotations

import math
from random import Random

import plotly.graph_objects as go
import pytest
from records import judged, metrics, study, trial

from dashboards.figures.modules import axes_figure
from trials.records.findings import OrderedAxis
from trials.records.study_record import relative_ne_percent
from trials.records.trial_record import Outcome, TrialKind

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
def figure() -> go.Figure:
    return axes_figure(study(axes=AXES))


def points_on(figure: go.Figure, x: str) -> dict[int, tuple[float, float, str]]:
    """Place, NE and trace of each trial on an axis."""
    points = [
        (int(hover.split("<br>")[0].removeprefix("trial ").partition(":")[0]), (place, ne, trace.name))
        for trace in figure.data
        if trace.xaxis == x
        for place, ne, hover in zip(trace.x, trace.y, trace.hovertext, strict=True)
    ]
    assert len(dict(points)) == len(points), "a candidate with equal layers is one point"
    return dict(points)


def test_candidates_with_a_result_stand_at_their_values(figure: go.Figure) -> None:
    record = study()
    baseline = record.trial(record.baseline).result.validation.ne
    with_result = (Outcome.COMPLETED, Outcome.STOPPED)
    points = points_on(figure, "x")
    assert set(points) == {t.number for t in record.candidates if t.result.outcome in with_result}
    for number, (place, ne, _) in points.items():
        of = record.trial(number)
        assert of.job.model["embedding_dim"] == (8, 16, 32)[int(place)]
        assert ne == pytest.approx(relative_ne_percent(of.result.validation.ne, baseline))
    marked = {number for number, (_, _, name) in points.items() if name == "on the front"}
    assert marked == set(record.front)


def test_layers_share_a_panel_and_ends_and_baseline_are_drawn(figure: go.Figure) -> None:
    titles = [axis.title.text for axis in figure.select_xaxes()]
    assert titles == [
        "embedding_dim",
        "training.learning_rate",
        "layer.out_embeddings",
    ]  # nobody has the last
    assert set(points_on(figure, "x3")) == set(points_on(figure, "x"))  # all layers have 8 here
    for x, ends in (("x", {0, 2}), ("x2", {0.0001, 0.01}), ("x3", {0, 1})):
        vertical = {shape.x0 for shape in figure.layout.shapes if shape.xref == x and shape.x0 == shape.x1}
        assert vertical == ends
        baseline = [shape for shape in figure.layout.shapes if shape.xref == f"{x} domain"]
        assert [(shape.y0, shape.y1) for shape in baseline] == [(0, 0)]
    axes = list(figure.select_xaxes())
    assert [axis.type for axis in axes] == ["linear", "log", "linear"]
    assert [axis.ticktext for axis in axes[:2]] == [("8", "16", "32"), ("0.0001", "0.01")]
    hovers = [hover for trace in figure.data for hover in trace.hovertext]
    assert any("embedding_dim 16" in hover and "to the baseline" in hover for hover in hovers)


def test_one_very_bad_candidate_does_not_press_the_rest_flat() -> None:
    record = study(axes=AXES)
    off_front = next(t for t in record.candidates if t.result.validation and t.number not in record.front)
    bad = off_front.with_result(validation=metrics(3.0))
    trials = tuple(bad if t.number == bad.number else t for t in record.trials)
    figure = axes_figure(record.replace(trials=trials))
    assert "above these frames" in figure.layout.title.subtitle.text
    assert figure.layout.yaxis.range[1] < 20


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
    figure = axes_figure(record)
    assert not figure.data
    assert figure.layout.title.subtitle.text.startswith("Shown as soon as")
    assert axes_figure(study()) is None  # whose space has no ordered axes
