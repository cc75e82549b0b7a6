"""How MLflow's pages of a study open: as shared views, which MLflow keeps in tags of the experiment.

MLflow nests runs below their parents only in the order of time, and its page of charts has its sections in
alphabetical order, all of them open. So there is a view for each way to look at a study, in all of which the
charts that matter, above all NE by FLOPs, are the first.
"""

from __future__ import annotations

import json
from typing import Any

VIEW, NESTED, GROUPED = "candidates", "seeds", "configurations"
"""Names of the shared views."""
VIEWS = {VIEW: "runs by NE", NESTED: "seeds below their trials", GROUPED: "means over the seeds"}
"""What each of them shows."""
METRICS = (
    *("best_ne", "best_ne_vs_baseline_percent", "cost/flops", "test/ne", "seeds/count", "seeds/test_ne.mean"),
    *("seeds/test_ne.std", "measured/examples_per_second"),
)
TAGS = ("outcome", "technique.planned", "technique.executed", "front")
"""Columns of the table of runs."""
FIRST = "Model metrics"
"""MLflow's name of the section of metrics without a prefix."""
OPEN = (FIRST, "test", "seeds", "study")
FOLDED = ("cost", "measured", "validation", "best", "training", "plan", "attempts")
"""Sections of the page of charts, in order."""
LINE = {
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
"""What MLflow gives a chart of lines."""


def view_link(experiment: str, name: str) -> str:
    """Returns the page of a view below the address of any server."""
    return f"#/experiments/{experiment}/runs?viewStateShareKey={name}&workflowType=machine_learning"


def view_tags() -> dict[str, str]:
    """Returns the experiment's tags that keep the views, by name."""
    flops, best = ({"key": key, "type": "METRIC"} for key in ("cost/flops", "best_ne"))
    front = {"xaxis": flops, "yaxis": best, "displayName": "NE by FLOPs", "runsCountToCompare": 100}
    charts = [
        _chart("front", "SCATTER", front),
        *(_chart(name, "LINE", {"metricKey": name, **LINE}) for name in ("ne", "ne_vs_baseline_percent")),
        *(_chart(name, "BAR", {"metricKey": name}) for name in ("best_ne", "best_ne_vs_baseline_percent")),
    ]
    common = {
        "selectedColumns": [*(f"metrics.`{name}`" for name in METRICS), *(f"tags.`{name}`" for name in TAGS)],
        "compareRunSections": [
            {"uuid": name, "name": name, "display": name in OPEN, "isReordered": False, "deleted": False}
            for name in (*OPEN, *FOLDED)
        ],
        "compareRunCharts": charts,
        "isAccordionReordered": True,
    }
    by_ne = {"orderByKey": "metrics.`best_ne`", "orderByAsc": True}
    by_time = {"orderByKey": "attributes.start_time", "orderByAsc": False}
    keys = [{"mode": "tag", "groupByData": "configuration"}]
    means = {"groupBy": {"aggregateFunction": "average", "groupByKeys": keys}}
    states = {VIEW: by_ne, NESTED: by_time, GROUPED: by_ne | means}
    return {f"mlflow.sharedViewState.{name}": json.dumps(common | state) for name, state in states.items()}


def _chart(name: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a chart of the first section."""
    common = {"uuid": name, "type": kind, "metricSectionId": FIRST, "deleted": False, "isGenerated": False}
    return common | {"runsCountToCompare": 20} | settings
