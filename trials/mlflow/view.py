"""How MLflow's pages of a study open: as shared views, which MLflow keeps in tags of the experiment.

MLflow nests runs below their parents only where they stand in the order of time, and its page of charts has its
sections in alphabetical order, all of them open. So there is a view for each way to look at a study: its runs by
NE, its runs with their retrainings below them, and a line for each configuration with the mean over its seeds. In
all of them the charts that matter are the first, and most other sections are folded.
"""

from __future__ import annotations

import json
from typing import Any

VIEW, NESTED, GROUPED = "candidates", "seeds", "configurations"
"""Names of the shared views."""
VIEWS = {VIEW: "runs by NE", NESTED: "seeds below their trials", GROUPED: "means over the seeds"}
"""What each of them shows."""
COLUMNS = (
    "metrics.`best_ne`",
    "metrics.`best_ne_vs_baseline_percent`",
    "metrics.`cost/flops`",
    "metrics.`test/ne`",
    "metrics.`seeds/count`",
    "metrics.`seeds/test_ne.mean`",
    "metrics.`seeds/test_ne.std`",
    "metrics.`measured/examples_per_second`",
    "tags.`outcome`",
    "tags.`technique.planned`",
    "tags.`technique.executed`",
    "tags.`front`",
)
FIRST = "Model metrics"
"""MLflow's name of the section of metrics without a prefix."""
OPEN = (FIRST, "test", "seeds", "study")
FOLDED = ("cost", "measured", "validation", "best", "training", "plan", "attempts")
"""Sections of the page of charts, in order."""


def view_tags() -> dict[str, str]:
    """Returns the experiment's tags that keep the views, by name."""
    by_ne = {"orderByKey": "metrics.`best_ne`", "orderByAsc": True}
    by_time = {"orderByKey": "attributes.start_time", "orderByAsc": False}
    key = {"mode": "tag", "groupByData": "configuration"}
    grouped = {"groupBy": {"aggregateFunction": "average", "groupByKeys": [key]}}
    states: dict[str, dict[str, Any]] = {
        VIEW: by_ne,
        NESTED: by_time,
        GROUPED: {**by_ne, **grouped},
    }
    common = {"selectedColumns": list(COLUMNS), **_charts()}
    return {f"mlflow.sharedViewState.{name}": json.dumps(common | state) for name, state in states.items()}


def view_link(experiment: str, name: str) -> str:
    """Returns the page of a view below the address of any server."""
    return f"#/experiments/{experiment}/runs?viewStateShareKey={name}&workflowType=machine_learning"


def _charts() -> dict[str, Any]:
    sections = [
        {"uuid": name, "name": name, "display": name in OPEN, "isReordered": False, "deleted": False}
        for name in (*OPEN, *FOLDED)
    ]
    ne_by_flops = {"xaxis": _axis("cost/flops"), "yaxis": _axis("best_ne"), "displayName": "NE by FLOPs"}
    charts = [
        _chart("front", "SCATTER", ne_by_flops | {"runsCountToCompare": 100}),
        *(_chart(name, "LINE", {"metricKey": name}) for name in ("ne", "ne_vs_baseline_percent")),
        *(_chart(name, "BAR", {"metricKey": name}) for name in ("best_ne", "best_ne_vs_baseline_percent")),
    ]
    return {"compareRunSections": sections, "compareRunCharts": charts, "isAccordionReordered": True}


def _axis(metric: str) -> dict[str, str]:
    return {"key": metric, "type": "METRIC"}


def _chart(name: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a chart of the first section, with what MLflow gives a chart of its kind besides."""
    line = {
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
    common = {"uuid": name, "type": kind, "metricSectionId": FIRST, "deleted": False, "isGenerated": False}
    return common | {"runsCountToCompare": 20} | (line if kind == "LINE" else {}) | settings
