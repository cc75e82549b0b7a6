"""A study as data frames: its trials, their points, curves and attempts, its winners with their intervals.

Columns have units in their names; NE is on validation where nothing else is said. What is not known is missing.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dashboards.rows import TrialRow, trial_rows
from trials.record import Attempt, Metrics
from trials.study_record import StudyRecord

METRICS = tuple(Metrics.model_fields)
COMPARED = (
    *("trial", "ne", "baseline_ne", "difference_percent", "low_percent", "high_percent"),
    *("p", "p_adjusted", "better", "seeds", "detectable_percent"),
)
ATTEMPT = tuple(name for name in Attempt.model_fields if name != "plan")
CURVE = ("trial", "examples", "epoch", "seconds", "train_loss", "learning_rate", *METRICS[:-1])


def trials_frame(record: StudyRecord) -> pd.DataFrame:
    """A row per trial, by its number."""
    rows = [_trial(row) for row in trial_rows(record)]
    return pd.DataFrame(rows).set_index("number")


def points_frame(record: StudyRecord) -> pd.DataFrame:
    """A row per candidate with a column for each axis of the space that its point has, by number."""
    points = {trial.number: dict(trial.point or {}) for trial in record.candidates}
    return pd.DataFrame.from_dict(points, orient="index").rename_axis("number")


def curves_frame(record: StudyRecord) -> pd.DataFrame:
    """A row per evaluation of each trial."""
    rows = [
        {name: getattr(point, name) for name in CURVE[1:6]}
        | _metrics(point.validation)
        | {"trial": trial.number}
        for trial in record.trials
        for point in trial.result.curve
    ]
    return pd.DataFrame(rows, columns=list(CURVE))


def attempts_frame(record: StudyRecord) -> pd.DataFrame:
    """A row per attempt to train a trial: what was predicted, and what was measured."""
    rows = [
        {"trial": trial.number, "attempt": index} | {name: _plain(getattr(attempt, name)) for name in ATTEMPT}
        for trial in record.trials
        for index, attempt in enumerate(trial.attempts)
    ]
    return pd.DataFrame(rows, columns=["trial", "attempt", *ATTEMPT])


def winners_frame(record: StudyRecord) -> pd.DataFrame:
    """A row per winner that was compared with the baseline on test, with its interval; by FLOPs.

    It is empty where winners were not confirmed (`confirm=`, `dhen-search confirm`).
    """
    names = {row.trial.number: row.name for row in trial_rows(record)}
    flops = {trial.number: trial.job.flops for trial in record.trials}
    rows = [
        {
            **{name: _plain(getattr(comparison, name)) for name in COMPARED},
            "model": names.get(comparison.trial),
            "flops": flops.get(comparison.trial),
        }
        for comparison in record.comparisons
    ]
    return pd.DataFrame(rows, columns=["trial", "model", "flops", *COMPARED[1:]]).set_index("trial")


def _trial(row: TrialRow) -> dict[str, Any]:
    trial = row.trial
    job, plan, result = trial.job, trial.plan, trial.result
    return {
        "number": trial.number,
        "kind": trial.kind.value,
        "outcome": result.outcome.value,
        "model": row.name,
        "ne": row.ne,
        "ne_vs_baseline_percent": row.relative_percent,
        "auc": row.quality.auc if row.quality else None,
        "calibration": row.quality.calibration if row.quality else None,
        "test_ne": result.test.ne if result.test else None,
        "flops": job.flops,
        "parameters": job.parameters,
        "table_bytes": job.table_bytes,
        "weights_bytes": job.weights_bytes,
        "serving_ms": plan.serving_ms,
        "planned_technique": plan.technique,
        "predicted_peak_bytes": plan.peak_bytes,
        "executed_technique": result.technique,
        **dict(result.measured),
        "seconds": result.seconds,
        "started_at": trial.origin.started_at,
        "marks": ", ".join(row.marks),
        "remark": row.remark,
    }


def _metrics(metrics: Metrics) -> dict[str, float]:
    return {name: getattr(metrics, name) for name in METRICS[:-1]}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
