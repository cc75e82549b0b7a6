"""What modules, parts, members and slices are worth: found where it is known, and not told where it cannot be."""

from __future__ import annotations

import re
from itertools import combinations
from random import Random
from typing import Any

import plotly.graph_objects as go
import pytest
from records import MODULES, bare, judged, study

from dashboards.figures.modules import FEWEST, modules_figure
from dashboards.figures.worth import (
    Estimate,
    ablations_figure,
    averages_figure,
    estimates_figure,
    slices_figure,
)
from dashboards.figures.worth import judged as verdict
from trials.records.findings import (
    AblatedPart,
    Ablation,
    MeanInterval,
    OrderedAxis,
    Slice,
    Slices,
    WinnerVerdict,
)
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

DEPTH = OrderedAxis(name="depth", part="depth", key="depth", values=(1, 2, 3))
WORTH = {"attention": -0.01, "cross": 0.006}


def candidate(number: int, *layers: tuple[str, ...], ne: float, **facts: Any) -> TrialRecord:
    model = {
        "family": "dhen",
        "layers": [{"modules": [{"kind": kind} for kind in kinds]} for kinds in layers],
    }
    return bare(number, ne=ne, flops=1e6, model=model, **facts)


def made_of(count: int, noise: float, *, worth: dict[str, float], seed: int = 0) -> list[TrialRecord]:
    """Candidates of one recipe of two modules each, whose NE is the sum of what these are worth."""
    random, pairs = Random(seed), list(combinations(MODULES, 2))
    trials = []
    for number in range(1, 1 + count):
        kinds, depth = pairs[number % len(pairs)], random.randint(1, 3)
        ne = 0.8 + sum(worth.get(kind, 0.0) for kind in kinds) - 0.002 * depth + random.gauss(0, noise)
        trials.append(candidate(number, *[kinds] * depth, ne=ne))
    return trials


def searched(*trials: TrialRecord, **changes: Any) -> StudyRecord:
    baseline = bare(0, ne=0.8, flops=1e6, kind=TrialKind.BASELINE)
    return judged([baseline, *trials], axes=(DEPTH,), **changes)


def values_in(figure: go.Figure) -> dict[str, tuple[float, float, float]]:
    """Value and ends of the interval of each row."""
    return {
        label: (value, value - low, value + high)
        for trace in figure.data
        if trace.name != "ablation of a winner"
        for label, value, low, high in zip(
            trace.y, trace.x, trace.error_x.arrayminus, trace.error_x.array, strict=True
        )
    }


def test_modules_that_matter_are_found_with_their_sign_and_size() -> None:
    figure = modules_figure(searched(*made_of(80, 0.0005, worth=WORTH)))
    values = values_in(figure)
    modules = [label for label in figure.layout.yaxis.categoryarray if label in MODULES]
    assert set(modules) == set(MODULES)
    # two modules of five are always there, so what they are worth is known but for a constant that all share
    apart = values["attention"][0] - values["cross"][0]
    assert apart == pytest.approx(100 * (WORTH["attention"] - WORTH["cross"]) / 0.8, rel=0.2)
    assert values["attention"][2] < 0 < values["cross"][1]
    assert figure.layout.title.text.startswith("Of all modules attention brings most: -")
    assert modules == sorted(modules, key=lambda label: values[label][0])
    (explained,) = re.findall(r"It explains (\d+) %", figure.layout.title.subtitle.text)
    assert int(explained) > 90


def test_noise_is_not_told_for_a_module() -> None:
    values = values_in(modules_figure(searched(*made_of(40, 0.005, worth={}, seed=3))))
    assert sum(high < 0 or low > 0 for _, low, high in values.values()) <= 1
    figure = modules_figure(searched(*made_of(FEWEST, 0.02, worth={}, seed=1)))
    assert "no better than their mean does" in figure.layout.title.subtitle.text
    assert figure.layout.title.text == f"What each module brings cannot be told from {FEWEST} candidates"
    assert {trace.name for trace in figure.data} == {"too few candidates to tell"}


def test_too_few_candidates_are_said_to_be() -> None:
    few = modules_figure(searched(*made_of(FEWEST - 1, 0.001, worth=WORTH)))
    reason = f"Too few candidates to tell: {FEWEST - 1} have an NE, {FEWEST} are needed."
    assert few.layout.title.subtitle.text == reason
    alike = [candidate(number, ("mlp",), ne=0.8) for number in range(1, 20)]
    reason = modules_figure(searched(*alike)).layout.title.subtitle.text
    assert reason.startswith("All candidates have the same modules")


def test_modules_are_told_by_layer_where_layers_differ() -> None:
    random = Random(1)
    trials = []
    for number in range(1, 61):
        first, second = random.choice(MODULES), random.choice(MODULES)
        ne = 0.8 - 0.01 * (second == "dlrm") + random.gauss(0, 0.0005)
        trials.append(candidate(number, (first,), (second,), ne=ne))
    values = values_in(modules_figure(searched(*trials)))
    assert values["layer 2: dlrm"][2] < 0
    assert abs(values["layer 1: dlrm"][0]) < 0.2 * abs(values["layer 2: dlrm"][0])
    shared = values_in(modules_figure(searched(*made_of(40, 0.001, worth=WORTH))))
    assert not [label for label in shared if label.startswith("layer")]


def test_one_wild_candidate_changes_little() -> None:
    trials = made_of(60, 0.0005, worth=WORTH)
    wild = candidate(99, ("attention", "mlp"), ne=9.0)
    apart = []
    for each in (trials, [*trials, wild]):
        values = values_in(modules_figure(searched(*each)))
        apart.append(values["attention"][0] - values["cross"][0])
    assert apart[1] == pytest.approx(apart[0], rel=0.4)


def test_stopped_candidates_count_with_what_they_would_have_come_to() -> None:
    trials = made_of(FEWEST, 0.001, worth=WORTH)
    stopped = [
        each.with_result(outcome=Outcome.STOPPED, expected_ne=0.7 if each.number == 1 else None)
        for each in trials[:2]
    ]
    figure = modules_figure(searched(*stopped, *trials[2:]))
    assert f"{FEWEST - 1} have an NE" in figure.layout.title.subtitle.text


ABLATION = Ablation(
    trial=1,
    seeds=(1, 2, 3),
    flops=1e6,
    parts=(
        AblatedPart(
            removed="layer0: attention",
            ne_percent=MeanInterval(mean=0.5, low=0.3, high=0.7),
            flops=4e5,
            flops_percent=60.0,
        ),
        AblatedPart(
            removed="layer1",
            ne_percent=MeanInterval(mean=-0.1, low=-0.4, high=0.2),
            flops=5e5,
            flops_percent=50.0,
        ),
        AblatedPart(removed="layer0: mlp", ne_percent=None, flops=9e5, flops_percent=10.0),
    ),
)


def test_ablations_say_what_each_part_brings() -> None:
    record = searched(*made_of(3, 0.001, worth=WORTH), ablations=(ABLATION,))
    figure = ablations_figure(record)
    assert values_in(figure) == {
        "layer 1: attention (60 % of FLOPs)": pytest.approx((-0.5, -0.7, -0.3)),
        "layer 2 (50 % of FLOPs)": pytest.approx((0.1, -0.2, 0.4)),
    }
    assert figure.layout.title.text == "layer 1: attention of trial 1 brings most: -0.50 % NE"
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        "lowers NE": ["layer 1: attention (60 % of FLOPs)"],
        "cannot tell": ["layer 2 (50 % of FLOPs)"],
    }
    assert "dhen-search ablate" in ablations_figure(study()).layout.title.subtitle.text
    beside = searched(*made_of(40, 0.001, worth=WORTH), ablations=(ABLATION,))
    trace = modules_figure(beside).data[-1]
    assert trace.name == "ablation of a winner"
    assert (trace.y, trace.x) == (("attention",), (-0.5,))


def sliced(baseline: int, *verdicts: WinnerVerdict) -> Slices:
    rows = [
        Slice(
            value=f"<{index}>",
            rows=100,
            base_rate=0.1,
            ne=0.79,
            baseline_ne=0.8,
            calibration=1.0,
            baseline_calibration=1.0,
            difference_percent=-1.0,
            low_percent=-1.5,
            high_percent=-0.5,
            better=better,
        )
        for index, better in enumerate(verdicts)
    ]
    rare = rows[0].replace(value="rare", difference_percent=None, low_percent=None, high_percent=None)
    return Slices(trial=1, baseline=baseline, column="site", seeds=(1, 2), slices=(*rows, rare))


def test_slices_have_the_verdicts_that_the_record_has() -> None:
    record = searched(
        *made_of(3, 0.001, worth=WORTH),
        slices=(sliced(0, WinnerVerdict.YES, WinnerVerdict.CANNOT_TELL, WinnerVerdict.NO),),
    )
    figure = slices_figure(record)
    assert figure.layout.title.text == "Better than the baseline on 1 of 3 slices, worse on 1, for sure"
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        "better than the baseline": ["site <0> (100 rows)"],
        "cannot tell": ["site <1> (100 rows)"],
        "worse than the baseline": ["site <2> (100 rows)"],
    }
    assert "site &lt;0&gt; (100 rows)" in figure.layout.yaxis.ticktext
    assert "1 more slices have too few rows" in figure.layout.title.subtitle.text
    against_another = slices_figure(record.replace(slices=(sliced(99, WinnerVerdict.YES),)))
    assert not against_another.data
    assert "dhen-search slices" in against_another.layout.title.subtitle.text


def test_averages_stand_beside_their_members() -> None:
    trials = [candidate(1, ("mlp",), ne=0.79), candidate(2, ("cross",), ne=0.78)]
    average = bare(3, ne=0.77, flops=2e6, kind=TrialKind.AVERAGE, members=(1, 2))
    record = searched(*trials, average)
    figure = averages_figure(record)
    _, members, drawn = figure.data
    assert set(members.customdata) == {1, 2}
    assert drawn.x[0] == pytest.approx(100 * (0.77 / 0.8 - 1))
    assert "-1.28 % to its best member" in drawn.hovertext[0]
    title = figure.layout.title.text
    assert title == "The best average has -1.28 % NE to its best member, trial 2, at 2x its FLOPs"
    unscored = record.replace(trials=tuple(each.with_result(validation=None) for each in record.trials))
    assert averages_figure(unscored).layout.title.subtitle.text.startswith("Shown as soon as")
    assert averages_figure(study()) is None


def test_a_wide_interval_does_not_press_the_others_flat() -> None:
    rows = [
        Estimate(label=str(index), percent=0.1 * index, low=-1.0, high=1.0, better=WinnerVerdict.CANNOT_TELL)
        for index in range(8)
    ]
    wild = Estimate(label="wild", percent=0.0, low=-90.0, high=90.0, better=WinnerVerdict.CANNOT_TELL)
    words = ("lower", "higher", "unsure")
    figure = estimates_figure([*rows, wild], title="t", subtitle="s.", axis="x", words=words)
    low, high = figure.layout.xaxis.range
    assert -3 < low < -1
    assert 1 < high < 3
    assert "1 of these intervals go beyond the frame" in figure.layout.title.subtitle.text


def test_an_interval_on_one_side_of_zero_is_a_verdict() -> None:
    verdicts = [verdict(*ends) for ends in ((-2, -1), (1, 2), (-1, 1), (None, None))]
    assert verdicts == [
        WinnerVerdict.YES,
        WinnerVerdict.NO,
        WinnerVerdict.CANNOT_TELL,
        WinnerVerdict.CANNOT_TELL,
    ]
