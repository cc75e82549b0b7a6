"""What an MLflow run says of a trial or of a study: plain values made from the records, without MLflow.

Time stamps come from the record, so that writing a sheet twice leaves the same rows.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dhen.values import dump_yaml
from trials.record import Attempt, CurvePoint, Metrics, Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord, relative_ne_curve, relative_ne_percent

KEY = "retraining"
"""Tag of a retraining's run, by which it is found again; other runs have `trial.number`."""
PARAM_LENGTH = 500
"""Length above which values of params are cut; they are whole in config.yaml."""
TAG_LENGTH = 5000
NAME_LENGTH = 250
"""Length above which a run's name is cut, as MLflow's database has it."""
STATUS = {
    Outcome.RUNNING: "RUNNING",
    Outcome.COMPLETED: "FINISHED",
    Outcome.STOPPED: "KILLED",
    Outcome.INTERRUPTED: "KILLED",
}
"""MLflow's status by outcome; all other outcomes are FAILED. Stopped early is KILLED, as MLflow has it for
Optuna's pruned trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One value of a metric."""

    step: int
    """Training examples seen; 0 where the metric has no curve."""
    value: float
    time_ms: int
    """Milliseconds since 1970."""


Series = dict[str, tuple[MetricValue, ...]]
"""Readings by metric, in the order of logging: a later sheet of the same trial only adds at the ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """All that one run holds."""

    name: str
    status: str
    start_ms: int
    end_ms: int | None
    tags: dict[str, str]
    params: dict[str, str]
    series: Series
    artifacts: dict[str, str]
    """Text files by name."""


def trial_sheet(trial: TrialRecord, record: StudyRecord, *, model_name: str = "") -> RunContents:
    """Returns the run of one trial."""
    start = _start_ms(trial)
    ended = trial.result.outcome is not Outcome.RUNNING
    config = {"model": trial.job.model, "training": trial.job.training}
    baseline = record.baseline_for(trial)
    series = _curve_series(trial, baseline)
    if ended:
        series |= _final_series(trial, baseline) | _attempt_series(trial)
    return RunContents(
        name=_run_name(trial, model_name),
        status=STATUS.get(trial.result.outcome, "FAILED"),
        start_ms=start,
        end_ms=start + _ms(trial.result.seconds) if ended else None,
        tags=_texts(
            _trial_tags(trial, record) | _attempt_tags(trial) | {"model": model_name or None}, TAG_LENGTH
        ),
        params=_texts({**trial.point, **dict(_flat(config))}, PARAM_LENGTH),
        series=series,
        artifacts={"config.yaml": dump_yaml(config)}
        | ({"cost.csv": _cost_csv(trial)} if trial.job.cost else {})
        | ({"plan.json": _plan_json(trial, record)} if trial.plan.summary else {}),
    )


def study_sheet(record: StudyRecord) -> RunContents:
    """Returns the parent run: the study's settings, and the best NE after each candidate that ended."""
    start = min((_start_ms(trial) for trial in record.trials), default=0)
    facts = {
        "space": record.space,
        "sampler": record.sampler,
        "seed": record.seed,
        "log": record.log.to_dict(),
        "cluster": record.cluster.to_dict() if record.cluster else None,
    }
    tags = {
        "kind": "study",
        "trials_budget": record.trials_budget,  # a tag: it may be raised later, and params are final
        "seconds_budget": record.seconds_budget,
        "finished": record.finished,
        "baseline": record.baseline,
        "best": record.best,
        "knee": record.knee,
        "front": ", ".join(str(number) for number in record.front) or None,
        "optimism_percent": record.choice.optimism_percent if record.choice else None,
    }
    return RunContents(
        name=record.name,
        status="FINISHED" if record.finished else "RUNNING" if record.running else "KILLED",
        start_ms=start,
        end_ms=start + _ms(record.elapsed_seconds) if record.finished else None,
        tags=_texts(tags, TAG_LENGTH),
        params=_texts(dict(_flat(facts)), PARAM_LENGTH),
        series={"study_best_ne": tuple(_best_so_far(record))},
        artifacts={},
    )


def run_key(trial: TrialRecord) -> str:
    """Returns the key by which a trial's run is known among all runs of the study."""
    return f"{KEY} {trial.number}" if trial.kind is TrialKind.RETRAINING else str(trial.number)


def _run_name(trial: TrialRecord, model_name: str) -> str:
    """Returns which trial it is, and the model in short: `trial 7: 2x[attention+dlrm] concat d16`."""
    return _text(": ".join(filter(None, (_trial_in_words(trial), model_name))), NAME_LENGTH)


def _trial_in_words(trial: TrialRecord) -> str:
    if trial.kind is TrialKind.RETRAINING:
        change = f" without {trial.origin.removed}" if trial.origin.removed else ""
        rows = f", first {trial.job.origin:,} rows" if trial.job.origin is not None else ""
        return f"trial {trial.origin.of}{change}{rows}, seed {trial.job.seed}"
    return f"{'baseline' if trial.kind is TrialKind.BASELINE else 'trial'} {trial.number}"


def marks(trial: TrialRecord, record: StudyRecord) -> dict[str, bool]:
    """Returns what the study says of a trial: whether it is on the front, best, knee, or the baseline."""
    if trial.kind is TrialKind.RETRAINING:  # retrainings are numbered apart from trials
        return dict.fromkeys(("front", "best", "knee", "baseline"), False)
    return {
        "front": trial.number in record.front,
        "best": trial.number == record.best,
        "knee": trial.number == record.knee,
        "baseline": trial.number == record.baseline,
    }


def _own_tags(trial: TrialRecord, record: StudyRecord) -> dict[str, Any]:
    """Returns which trial it is, and of a winner whether it is better than the baseline; or what was retrained."""
    if trial.kind is TrialKind.RETRAINING:
        return {
            KEY: run_key(trial),
            "of": trial.origin.of,
            "seed": trial.job.seed,
            "removed": trial.origin.removed,
            "origin": trial.job.origin,
        }
    tags: dict[str, Any] = {"trial.number": trial.number}
    if trial.origin.members or trial.origin.retrained_members:
        tags["members"] = ", ".join(map(run_key, record.networks(trial)))
    judged = record.choice.of(trial.number) if record.choice else None
    if record.choice:
        winner = next((winner for winner in record.choice.winners if winner.trial == trial.number), None)
        tags["winner"] = ", ".join(winner.reasons) if winner else None
    if judged is not None:
        tags |= {"choice.close": judged.close, "choice.worse_periods": judged.worse_periods}
        tags |= {"choice.percent": judged.percent, "choice.standard_error": judged.standard_error}
    comparison = record.comparison(trial.number)
    if comparison is not None:
        values = comparison.to_dict()
        names = (
            "better",
            "difference_percent",
            "low_percent",
            "high_percent",
            "p_adjusted",
            "detectable_percent",
        )
        tags |= {f"baseline.{name}": values[name] for name in names}
    return tags


def _trial_tags(trial: TrialRecord, record: StudyRecord) -> dict[str, Any]:
    origin, proposal = trial.origin.reused_from_study, trial.origin.proposal
    return {
        **_own_tags(trial, record),
        "kind": trial.kind.value,
        "outcome": trial.result.outcome.value,
        "technique.planned": trial.plan.technique,
        "technique.executed": trial.result.technique,
        "technique.forced": trial.first_plan.restricted_to if trial.first_plan else None,
        # attempts after one that ran out of memory are planned without it
        "memory_margin": (trial.first_plan.memory_margin or None) if trial.first_plan else None,
        "fingerprint": trial.job.fingerprint,
        "tuned_from": trial.origin.tuned_from,
        "proposed.by": (proposal.by or f"line {proposal.line}") if proposal else None,
        "proposed.why": proposal.why if proposal else None,
        "reused_from": trial.origin.reused_from,
        "promoted_from": trial.origin.promoted_from,
        "distilled_from": trial.origin.distilled_from,
        "teacher": trial.origin.teacher,
        "reused_from_study": f"{origin.directory} trial {origin.trial}" if origin else None,
        "error": trial.result.error,
        **marks(trial, record),
    }


def _attempt_tags(trial: TrialRecord) -> dict[str, Any]:
    """Returns how many trainings a trial took, and what each was: `attempt.0.strategy`, `attempt.0.outcome` ..."""
    tags: dict[str, Any] = {"attempts": len(trial.attempts)}
    for number, attempt in enumerate(trial.attempts):
        attempt_values = {
            "strategy": attempt.strategy,
            "executed": attempt.executed,
            "outcome": attempt.outcome.value,
            "error": attempt.error,
        }
        tags |= {f"attempt.{number}.{name}": value for name, value in attempt_values.items()}
    return tags


def _attempt_series(trial: TrialRecord) -> Series:
    """Returns the numbers of each training, `attempt.0.predicted_bytes` ..., with the trial's end as their
    time."""
    numbers = set(Attempt.model_fields) - {"strategy", "executed", "plan", "outcome", "error"}
    time_ms = _start_ms(trial) + _ms(trial.result.seconds)
    return {
        f"attempt.{number}.{name}": (MetricValue(step=0, value=float(value), time_ms=time_ms),)
        for number, attempt in enumerate(trial.attempts)
        for name in sorted(numbers)
        if (value := getattr(attempt, name)) is not None and math.isfinite(value)
    }


def _curve_series(trial: TrialRecord, baseline: TrialRecord | None) -> Series:
    """Returns the metrics against training examples seen."""
    relative = dict(relative_ne_curve(trial.result.curve, baseline.result.curve if baseline else ()))
    series: dict[str, list[MetricValue]] = {}
    for point in trial.result.curve:
        time_ms = _start_ms(trial) + _ms(point.seconds)
        for key, value in _of_point(point, relative.get(point.examples)).items():
            if value is not None and math.isfinite(value):
                reading = MetricValue(step=point.examples, value=value, time_ms=time_ms)
                series.setdefault(key, []).append(reading)
    return {key: tuple(readings) for key, readings in series.items()}


def _of_point(point: CurvePoint, relative: float | None) -> dict[str, float | None]:
    return {
        **_quality(point.validation, ""),
        "train_loss": point.train_loss,
        "learning_rate": point.learning_rate,
        "clipped": point.clipped,
        "ne_vs_baseline_percent": relative,
    }


def _final_series(trial: TrialRecord, baseline: TrialRecord | None) -> Series:
    """Returns one reading per metric: quality at the kept weights, cost, speed, memory, and the test split if
    scored."""
    relative = None
    if trial.result.validation and baseline and baseline.result.validation:
        relative = relative_ne_percent(trial.result.validation.ne, baseline.result.validation.ne)
    values = {
        **_quality(trial.result.validation, "best_"),
        "best_ne_vs_baseline_percent": relative,
        "flops": trial.job.flops,
        "parameters": trial.job.parameters,
        "embedding_parameters": trial.job.embedding_parameters,
        "weights_bytes": trial.job.weights_bytes,
        "table_bytes": trial.job.table_bytes,
        "predicted_peak_bytes": trial.plan.peak_bytes,
        "predicted_step_seconds": trial.plan.step_seconds,
        "serving_ms": trial.plan.serving_ms,
        "serving_excess": trial.plan.serving_excess,
        **dict(trial.result.measured),
        "seconds": trial.result.seconds,
        **_quality(trial.result.test, "test_"),
    }
    time_ms = _start_ms(trial) + _ms(trial.result.seconds)
    return {
        key: (MetricValue(step=0, value=float(value), time_ms=time_ms),)
        for key, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _quality(metrics: Metrics | None, prefix: str) -> dict[str, float | None]:
    names = ("ne", "log_loss", "auc", "calibration")
    return {f"{prefix}{name}": getattr(metrics, name) for name in names} if metrics else {}


def _best_so_far(record: StudyRecord) -> Iterator[MetricValue]:
    """Yields the best NE by the number of candidates that have ended, in the order of ending."""
    ended = [trial for trial in record.candidates if trial.result.outcome is not Outcome.RUNNING]
    best = math.inf
    ends = sorted((_start_ms(trial) + _ms(trial.result.seconds), trial.number, trial) for trial in ended)
    for count, (time_ms, _, trial) in enumerate(ends, start=1):
        if trial.result.validation and trial.result.outcome is Outcome.COMPLETED:
            best = min(best, trial.result.validation.ne)
        if math.isfinite(best):
            yield MetricValue(step=count, value=best, time_ms=time_ms)


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields leaves by dotted path; a list of plain values is one leaf."""
    nested = (dict, list, tuple)
    if isinstance(data, Mapping):
        children: Any = data.items()
    elif isinstance(data, (list, tuple)) and any(isinstance(item, nested) for item in data):
        children = enumerate(data)
    else:
        yield path, data
        return
    for key, value in children:
        yield from _flat(value, f"{path}.{key}" if path else str(key))


def _texts(values: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Returns values as MLflow takes them: other characters in names replaced, long values cut, unknown ones left
    out."""
    return {
        re.sub(r"[^\w.\-/: ]", "_", key)[:250]: _text(value, limit)
        for key, value in values.items()
        if value is not None
    }


def _text(value: Any, limit: int) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _plan_json(trial: TrialRecord, record: StudyRecord) -> str:
    """Returns the first plan, with the cluster that it is for, and the attempts, each with its own plan."""
    cluster = record.cluster.to_dict() if record.cluster else None
    first = trial.first_plan.to_dict() if trial.first_plan else {}
    attempts = [
        {
            "strategy": attempt.strategy,
            "executed": attempt.executed,
            "outcome": attempt.outcome.value,
            "error": attempt.error,
            "plan": attempt.plan.to_dict() if attempt.plan else None,
        }
        for attempt in trial.attempts
    ]
    return json.dumps({"cluster": cluster} | first | {"attempts": attempts}, indent=1)


def _cost_csv(trial: TrialRecord) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "kind", "flops", "parameters", "bytes"))
    writer.writerows((row.name, row.kind, row.flops, row.parameters, row.bytes) for row in trial.job.cost)
    return text.getvalue()


def _start_ms(trial: TrialRecord) -> int:
    return (
        round(datetime.fromisoformat(trial.origin.started_at).timestamp() * 1000)
        if trial.origin.started_at
        else 0
    )


def _ms(seconds: float | None) -> int:
    return round(1000 * seconds) if seconds is not None and math.isfinite(seconds) else 0
