from __future__ import annotations

import json
import math
from random import Random

import pytest
from records import judged, study, trial
from reports.planned import cost, planned, planned_study

from dashboards.report.embed import as_json, study_data
from dashboards.report.page import MOST_DRAWN_POINTS, with_thin_curves
from dashboards.rows import columns_of, trial_rows
from dhen.cost import headline_flops
from trials.records.study_record import StudyRecord, relative_ne_curve
from trials.records.trial_record import TrialKind


def test_curves_are_those_of_the_record_relative_to_the_baseline() -> None:
    record = study()
    data, (percents, _) = study_data(record), study_data(record)["study"]["scales"]
    for trial_, embedded in zip(record.trials, data["trials"], strict=True):
        expected = relative_ne_curve(trial_.result.curve, record.trial(record.baseline).result.curve)
        curve = embedded["curve"]
        assert (curve is None) == (not trial_.result.curve)
        if curve is not None:
            assert curve["relative"]
            assert data["grids"][curve["grid"]] == [examples for examples, _ in expected]
            assert [value / percents for value in curve["values"]] == pytest.approx(
                [v for _, v in expected], abs=1e-4
            )


def test_json_in_a_script_cannot_end_it() -> None:
    evil = "</script><!--<script>&\u2028"
    text = as_json({evil: [evil]})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {evil: [evil]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(math.nan)
    bad = trial(1, Random(1)).with_job(flops=math.nan)
    bad = bad.with_result(validation=bad.result.validation.replace(ne=math.inf, auc=math.nan))
    assert json.loads(as_json(study_data(judged([]).replace(trials=(bad,)))))["trials"][0]["flops"] is None


def test_a_record_that_lacks_what_is_newer_is_told_as_far_as_it_goes() -> None:
    """The plain data of an early version: fields that came later are missing altogether."""
    layers = [{"modules": ["linear"]}, "?"]
    early = {
        **{"name": "old", "directory": "runs/old", "space": "default", "sampler": "tpe", "seed": 0},
        "log": {"name": "l", "fingerprint": "0", "rows": {}, "base_rate": {}, "tables": 1, "numeric": 0},
        "trials": [{"number": 0, "kind": "candidate", "job": {"model": {"layers": layers}}}],
    }
    record = StudyRecord.model_validate(early)
    (embedded,) = json.loads(as_json(study_data(record)))["trials"]
    assert embedded["held"] is None
    assert embedded["cost"] == []
    assert [layer["modules"] for layer in embedded["model"]["layers"]] == [[["linear", ""]]]


def test_cost_is_folded_by_layer_and_module_and_nothing_is_lost() -> None:
    data = study_data(judged([planned(1).with_job(cost=cost())]))
    layers = {
        layer: {data["costs"][place]["name"]: data["costs"][place] for place in places}
        for layer, places in data["trials"][0]["cost"]
    }
    assert list(layers) == ["features", "layer 1", "layer 2", "head"]
    assert list(layers["layer 1"]) == ["attention", "dlrm", "shortcut"]
    assert layers["layer 1"]["attention"]["flops"] == 50_000
    assert layers["layer 1"]["attention"]["other"] == 500
    assert len(layers["features"]["embedding tables"]["rows"]) == 10
    assert layers["features"]["embedding tables"]["bytes"] == 640
    modules = [module for layer in layers.values() for module in layer.values()]
    assert sum(module["flops"] for module in modules) == headline_flops(cost())
    assert sum(module["parameters"] for module in modules) == sum(row.parameters for row in cost())


def test_curves_are_thinned_where_a_figure_could_not_show_them() -> None:
    record = planned_study(300, points=60)
    thin = with_thin_curves(record)
    whole = {*record.front, record.baseline, record.best, record.knee}
    for before, after in zip(record.trials, thin.trials, strict=True):
        if before.number in whole:
            assert after == before
            continue
        points = after.result.curve
        assert len(points) <= MOST_DRAWN_POINTS // 300 + 2
        assert set(points) <= set(before.result.curve)
        assert (points[0], points[-1]) == (before.result.curve[0], before.result.curve[-1])
        assert min(p.validation.ne for p in points) == min(p.validation.ne for p in before.result.curve)
    assert with_thin_curves(study()) == study()


def test_an_average_has_no_technique_and_what_does_not_fit_has_none() -> None:
    record = study(12)
    of = record.trial(record.front[0])
    average = of.replace(number=len(record.trials), kind=TrialKind.AVERAGE).with_result(technique=None)
    average = average.with_plan(technique=None)
    rows = {row.trial.number: row for row in trial_rows(record.replace(trials=(*record.trials, average)))}
    by_id = {column.id: column for column in columns_of(record)}
    for name in ("technique", "planned"):
        assert by_id[name].cell(rows[average.number]) == ("", None)
    infeasible = of.with_plan(technique=None).with_result(technique=None)
    rows = {row.trial.number: row for row in trial_rows(record.replace(trials=(infeasible,)))}
    assert by_id["technique"].cell(rows[of.number]) == ("nothing fits", None)
