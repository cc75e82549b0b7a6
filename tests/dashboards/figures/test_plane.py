"""The front's points by memory technique, their sizes, and the intervals of winners."""

from __future__ import annotations

from random import Random

import pytest
from records import changed, study, trial
from reports.planned import confirmed

from dashboards.figures.plane import front_figure
from dashboards.figures.style import LOOKS, in_order, looks, study_techniques
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind

TECHNIQUES = ("dp", "zero1", "fsdp+cpu_offload", "hsdp")
MIB = 2**20


def planned(record: StudyRecord) -> StudyRecord:
    """Each candidate with a technique and a predicted peak."""
    trials = [
        each.with_plan(
            technique=TECHNIQUES[each.number % 4] if each.plan.technique else None,
            peak_bytes=(1 + each.number) * MIB,
        )
        for each in record.trials
    ]
    return record.replace(trials=tuple(trials))


def test_colour_and_shape_say_the_technique() -> None:
    record = planned(study())
    figure = front_figure(record)
    by_name = {trace.name.split(" (")[0]: trace for trace in figure.data if trace.name}
    assert set(TECHNIQUES) <= set(by_name)
    found = looks(TECHNIQUES)
    for technique in TECHNIQUES:
        trace = by_name[technique]
        assert {record.trial(number).plan.technique for number in trace.customdata} == {technique}
        assert trace.marker.color == found[technique].color
        assert {symbol.removesuffix("-open") for symbol in trace.marker.symbol} == {found[technique].symbol}
        for hover in trace.hovertext:
            assert f"<br>{technique}, " in hover


def test_no_two_techniques_look_the_same() -> None:
    names = [
        *LOOKS,
        *(f"{dense}+cpu_offload" for dense in ("shard_grad_op", "hsdp", "fsdp")),
        "dp+micro_batches=2",
    ]
    found = looks(names)
    assert len({(look.color, look.symbol) for look in found.values()}) == len(names)
    assert len({look.symbol for look in found.values()}) == len(names)
    assert found["fsdp"] == looks(["fsdp"])["fsdp"]
    assert in_order(["fsdp+cpu_offload", "zero1", "dp"]) == ("dp", "zero1", "fsdp+cpu_offload")


def test_area_grows_with_predicted_memory() -> None:
    record = planned(study())
    figure = front_figure(record)
    sizes = {
        number: size
        for trace in figure.data
        if trace.mode == "markers" and trace.customdata is not None
        for number, size in zip(trace.customdata, trace.marker.size, strict=True)
    }
    last, half = max(sizes), max(sizes) // 2
    assert sizes[last] / sizes[half] == pytest.approx(((1 + last) / (1 + half)) ** 0.5)
    assert "Area: predicted peak memory of a rank" in figure.layout.title.subtitle.text
    alike = record.replace(trials=tuple(each.with_plan(peak_bytes=MIB) for each in record.trials))
    figure = front_figure(alike)
    assert "Area" not in figure.layout.title.subtitle.text


def test_winners_have_the_intervals_of_their_comparisons() -> None:
    record = confirmed(study())
    (comparison,) = record.comparisons
    figure = front_figure(record)
    trace = next(trace for trace in figure.data if "retrained" in (trace.name or ""))
    baseline = record.trial(record.baseline).result.validation.ne
    low, high = trace.y[0] - trace.error_y.arrayminus[0], trace.y[0] + trace.error_y.array[0]
    assert trace.customdata == (record.best,)
    ends = [baseline * (1 + percent / 100) for percent in (comparison.low_percent, comparison.high_percent)]
    assert [low, high] == pytest.approx(ends)
    assert figure.layout.yaxis.range[0] < low < high < figure.layout.yaxis.range[1]
    assert not any("retrained" in (trace.name or "") for trace in front_figure(study()).data)


def test_an_average_and_what_fits_nowhere_have_no_technique() -> None:
    record = study()
    average = record.trial(record.best).replace(number=100, kind=TrialKind.AVERAGE)
    record = record.replace(trials=(*record.trials, average), front=(*record.front, 100))
    figure = front_figure(record)
    (averages,) = (trace for trace in figure.data if trace.name == "averages")
    assert averages.customdata == (100,)
    assert "per rank predicted" not in averages.hovertext[0]
    assert "dp" in study_techniques(record)
    only = record.replace(trials=(average,))
    assert study_techniques(only) == ()
    nowhere = changed(trial(0, Random(0), outcome=Outcome.INFEASIBLE), technique=None)
    assert study_techniques(study(0).replace(trials=(nowhere,))) == ()
