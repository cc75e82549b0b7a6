"""The metrics of MLflow's runs: readings by name, against training examples seen where there is a curve.

MLflow's chart page makes a section of each prefix before a `/`. Without a prefix is what is looked at first:
`best_ne`, and the curves `ne` and `ne_vs_baseline_percent`; all else stands in sections that may be folded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import mean, stdev

from trials.record import Attempt, Curve, CurvePoint, Metrics, Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord, relative_ne_curve, relative_ne_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One value of a metric."""

    step: int
    """Training examples seen; 0 where the metric has no curve. Of metrics over seeds their number, of those of the
    study the number of candidates that have ended."""
    value: float
    time_ms: int
    """Milliseconds since 1970."""


Series = dict[str, tuple[MetricValue, ...]]
"""Readings by metric, in the order of logging: a later sheet of the same trial only adds at the ends."""


def trial_series(trial: TrialRecord, record: StudyRecord) -> Series:
    """Returns all metrics of a trial: its curve, and once it has ended its quality, its cost and what it took."""
    baseline = record.baseline_for(trial)
    series = _curve_series(trial, baseline)
    if trial.result.outcome is Outcome.RUNNING:
        return series
    return series | _final_series(trial, baseline) | _attempt_series(trial) | _seed_series(trial, record)


def study_series(record: StudyRecord) -> Series:
    """Returns the metrics of the study: its best NE after each candidate that has ended."""
    return {"study/best_ne": tuple(_best_so_far(record))}


def seeds_of(trial: TrialRecord, record: StudyRecord) -> list[TrialRecord]:
    """Returns the completed retrainings of a trial's whole network, in the order of their ends."""
    if trial.kind is TrialKind.RETRAINING:
        return []
    refit = bool(record.refits)  # what learnt from validation too, and what did not, has no mean together
    seeds = [
        other
        for other in record.retrainings
        if _is_seed_of(other, trial) and (other.job.refit is not None) == refit
    ]
    return sorted(seeds, key=lambda other: (end_ms(other), other.number))


def start_ms(trial: TrialRecord) -> int:
    """Returns when a trial began, in milliseconds since 1970; 0 where that is not known."""
    started_at = trial.origin.started_at
    return round(datetime.fromisoformat(started_at).timestamp() * 1000) if started_at else 0


def end_ms(trial: TrialRecord) -> int:
    """Returns when a trial ended, in milliseconds since 1970."""
    return start_ms(trial) + milliseconds(trial.result.seconds)


def milliseconds(seconds: float | None) -> int:
    """Returns a duration in whole milliseconds; 0 where it is not known."""
    return round(1000 * seconds) if seconds is not None and math.isfinite(seconds) else 0


def _curve_series(trial: TrialRecord, baseline: TrialRecord | None) -> Series:
    relative = dict(relative_ne_curve(trial.result.curve, baseline.result.curve if baseline else Curve()))
    series: dict[str, list[MetricValue]] = {}
    for point in trial.result.curve:
        time_ms = start_ms(trial) + milliseconds(point.seconds)
        for key, value in _of_point(point, relative.get(point.examples)).items():
            if value is not None and math.isfinite(value):
                reading = MetricValue(step=point.examples, value=value, time_ms=time_ms)
                series.setdefault(key, []).append(reading)
    return {key: tuple(readings) for key, readings in series.items()}


def _of_point(point: CurvePoint, relative: float | None) -> dict[str, float | None]:
    quality = point.validation
    return {
        "ne": quality.ne,
        "ne_vs_baseline_percent": relative,
        "training/loss": point.train_loss,
        "training/learning_rate": point.learning_rate,
        "training/clipped": point.clipped,
        **_further(quality, "validation/"),
    }


def _final_series(trial: TrialRecord, baseline: TrialRecord | None) -> Series:
    """Returns one reading per metric: quality at the kept weights, cost, speed, memory, and the test split if
    scored."""
    validation, test = trial.result.validation, trial.result.test
    relative = None
    if validation and baseline and baseline.result.validation:
        relative = relative_ne_percent(validation.ne, baseline.result.validation.ne)
    return _at_end(
        trial,
        {
            "best_ne": validation.ne if validation else None,
            "best_ne_vs_baseline_percent": relative,
            **_further(validation, "best/"),
            "test/ne": test.ne if test else None,
            **_further(test, "test/"),
            "cost/flops": trial.job.flops,
            "cost/parameters": trial.job.parameters,
            "cost/embedding_parameters": trial.job.embedding_parameters,
            "cost/weights_bytes": trial.job.weights_bytes,
            "cost/table_bytes": trial.job.table_bytes,
            "plan/peak_bytes": trial.plan.peak_bytes,
            "plan/step_seconds": trial.plan.step_seconds,
            "plan/serving_ms": trial.plan.serving_ms,
            "plan/serving_excess": trial.plan.serving_excess,
            **{f"measured/{name}": value for name, value in trial.result.measured.numbers.items()},
            "measured/seconds": trial.result.seconds,
        },
    )


def _attempt_series(trial: TrialRecord) -> Series:
    """Returns the numbers of each training, `attempts/0.predicted_bytes` ..."""
    words = {"strategy", "executed", "plan", "outcome", "error", "replaced", "slow_rank"}
    numbers = sorted(set(Attempt.model_fields) - words)
    return _at_end(
        trial,
        {
            f"attempts/{number}.{name}": getattr(attempt, name)
            for number, attempt in enumerate(trial.attempts)
            for name in numbers
        },
    )


def _seed_series(trial: TrialRecord, record: StudyRecord) -> Series:
    """Returns mean and spread over the seeds from which the trial's network was trained again; the training that
    was chosen is not among them, because it was chosen for its luck too."""
    seeds = seeds_of(trial, record)
    ne = [(end_ms(seed), seed.result.validation.ne) for seed in seeds if seed.result.validation]
    test_ne = [(end_ms(seed), seed.result.test.ne) for seed in seeds if seed.result.test]
    counts = tuple(
        MetricValue(step=count, value=float(count), time_ms=time_ms)
        for count, (time_ms, _) in enumerate(ne or test_ne, start=1)
    )
    counted: Series = {"seeds/count": counts} if counts else {}
    return counted | _mean_and_std("seeds/best_ne", ne) | _mean_and_std("seeds/test_ne", test_ne)


def _mean_and_std(name: str, timed_values: list[tuple[int, float]]) -> Series:
    """Returns mean and sample standard deviation of the first value, the first two and so on."""
    values = [value for _, value in timed_values]
    means, deviations = list[MetricValue](), list[MetricValue]()
    for count, (time_ms, _) in enumerate(timed_values, start=1):
        means.append(MetricValue(step=count, value=mean(values[:count]), time_ms=time_ms))
        if count > 1:
            deviations.append(MetricValue(step=count, value=stdev(values[:count]), time_ms=time_ms))
    series = {f"{name}.mean": tuple(means), f"{name}.std": tuple(deviations)}
    return {key: readings for key, readings in series.items() if readings}


def _is_seed_of(other: TrialRecord, trial: TrialRecord) -> bool:
    whole = other.origin.removed is None and other.job.origin is None
    return whole and other.origin.of == trial.number and other.result.outcome is Outcome.COMPLETED


def _at_end(trial: TrialRecord, values: Mapping[str, float | None]) -> Series:
    """Returns one reading per value that is a number, with the trial's end as its time."""
    return {
        key: (MetricValue(step=0, value=float(value), time_ms=end_ms(trial)),)
        for key, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _further(metrics: Metrics | None, prefix: str) -> dict[str, float | None]:
    """Returns quality beside NE."""
    names = ("log_loss", "auc", "calibration")
    return {f"{prefix}{name}": getattr(metrics, name) for name in names} if metrics else {}


def _best_so_far(record: StudyRecord) -> Iterator[MetricValue]:
    """Yields the best NE by the number of candidates that have ended, in the order of ending."""
    ended = [trial for trial in record.candidates if not trial.result.outcome.unfinished]
    best = math.inf
    ends = sorted((end_ms(trial), trial.number, trial) for trial in ended)
    for count, (time_ms, _, trial) in enumerate(ends, start=1):
        if trial.result.validation and trial.result.outcome is Outcome.COMPLETED:
            best = min(best, trial.result.validation.ne)
        if math.isfinite(best):
            yield MetricValue(step=count, value=best, time_ms=time_ms)
