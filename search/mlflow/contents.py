"""What an MLflow run holds of a trial or of a study: plain values made from the record, without MLflow.

MLflow's chart page makes a section of each prefix before a `/`. Without a prefix is what is looked at first:
`best_ne`, and the curves `ne` and `ne_vs_baseline_percent`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from statistics import mean, stdev
from typing import Any, NamedTuple

from dashboards.names import trial_name
from dashboards.rows import winner_reasons
from dhen.values import dump_yaml
from trials.records.study_record import StudyRecord, relative_ne_curve, relative_ne_percent
from trials.records.trial_record import Attempt, Metrics, Outcome, TrialKind, TrialRecord

STUDY, KEY = "study", "retraining"
"""Key of the study's run, and the tag of a retraining's run that has its key; a trial's key is its number."""
PARAM_LENGTH, TAG_LENGTH, NAME_LENGTH = 500, 5000, 250
"""Lengths above which values of params (whole in config.yaml), tags and runs' names are cut."""
STATUS = dict.fromkeys(Outcome, "FAILED") | {
    Outcome.RUNNING: "RUNNING",
    Outcome.COMPLETED: "FINISHED",
    Outcome.STOPPED: "KILLED",
    Outcome.INTERRUPTED: "KILLED",
}
"""MLflow's status by outcome. KILLED is also what MLflow has for Optuna's pruned trials."""
ATTEMPT_WORDS = ("strategy", "executed", "outcome", "error", "replaced", "slow_rank")
ATTEMPT_NUMBERS = sorted(set(Attempt.model_fields) - {*ATTEMPT_WORDS, "plan"})
ORIGINS = ("tuned_from", "reused_from", "promoted_from", "distilled_from", "teacher")
COSTS = ("flops", "parameters", "embedding_parameters", "weights_bytes", "table_bytes")
PLANNED = ("peak_bytes", "step_seconds", "serving_ms", "serving_excess")
JUDGED = ("close", "worse_periods", "percent", "standard_error")
COMPARED = ("better", "difference_percent", "low_percent", "high_percent", "p_adjusted", "detectable_percent")


class MetricValue(NamedTuple):
    """One value of a metric."""

    step: int
    """Training examples seen; of the study's metrics the number of candidates that have ended; else 0."""
    value: float
    time_ms: int
    """Milliseconds since 1970."""


Series = dict[str, tuple[MetricValue, ...]]
"""Values by metric, by ascending step."""


class RunContents(NamedTuple):
    """All that one run holds beside its files."""

    name: str
    status: str
    start_ms: int
    end_ms: int | None
    tags: dict[str, str]
    params: dict[str, str]
    series: Series


def run_key(trial: TrialRecord) -> str:
    """Returns the key by which a trial's run is known among all runs of the study."""
    return f"{KEY} {trial.number}" if trial.kind is TrialKind.RETRAINING else str(trial.number)


def study_status(record: StudyRecord) -> str:
    """Returns MLflow's status of a study's run."""
    return "FINISHED" if record.finished else "RUNNING" if record.running else "KILLED"


def trial_contents(trial: TrialRecord, record: StudyRecord) -> RunContents:
    """Returns the run of one trial."""
    retrained, model = trial.kind is TrialKind.RETRAINING, trial_name(trial)
    removed = f" without {trial.origin.removed}" if trial.origin.removed else ""
    rows = f" first {trial.job.origin:,} rows" if retrained and trial.job.origin is not None else ""
    # what a trial and its retrainings from other seeds have in common, by which MLflow's table groups them
    what = f"#{trial.network_of}{removed}{rows}{' refit' if trial.job.refit is not None else ''}"
    # MLflow's table shows some twenty characters of a name: what tells runs apart comes first
    start = f"{what} seed {trial.job.seed}" if retrained else what
    tuned = any(each.number == trial.network_of and each.kind is TrialKind.BASELINE for each in record.trials)
    end = " baseline" if tuned else ""
    training = {"model": trial.job.model, "training": trial.job.training}
    tags = _trial_tags(trial, record) | {"model": model, "configuration": f"{what} {model}"}
    return RunContents(
        name=f"{start} {_text(model, NAME_LENGTH - len(start) - len(end) - 1)}{end}",
        status=STATUS[trial.result.outcome],
        start_ms=_start_ms(trial),
        end_ms=_end_ms(trial) if trial.result.outcome is not Outcome.RUNNING else None,
        tags=_texts(tags, TAG_LENGTH),
        params=_texts({**trial.point, **dict(_flat(training))}, PARAM_LENGTH),
        series=_trial_series(trial, record),
    )


def trial_files(trial: TrialRecord, record: StudyRecord) -> Iterator[tuple[str, str]]:
    """Yields the text files of a trial's run: its configuration whole, its cost by module, its plans."""
    yield "config.yaml", dump_yaml({"model": trial.job.model, "training": trial.job.training})
    if trial.job.cost:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("name", "kind", "flops", "parameters", "bytes"))
        writer.writerows((row.name, row.kind, row.flops, row.parameters, row.bytes) for row in trial.job.cost)
        yield "cost.csv", text.getvalue()
    if trial.plan.summary:
        plan: dict[str, Any] = {"cluster": record.cluster.to_dict() if record.cluster else None}
        plan |= trial.first_plan.to_dict() if trial.first_plan else {}
        shown = {"strategy", "executed", "outcome", "error", "plan"}
        plan["attempts"] = [attempt.model_dump(mode="json", include=shown) for attempt in trial.attempts]
        yield "plan.json", json.dumps(plan, indent=1)


def study_contents(record: StudyRecord) -> RunContents:
    """Returns the study's own run: its settings, and its best NE after each candidate that has ended."""
    start = min((_start_ms(trial) for trial in record.trials), default=0)
    facts = {
        "space": record.space,
        "sampler": record.sampler,
        "seed": record.seed,
        # columns are in MLflow's dataset of the log
        "log": {name: value for name, value in record.log.to_dict().items() if name != "columns"},
        "cluster": record.cluster.to_dict() if record.cluster else None,
    }
    tags = {
        "kind": STUDY,
        "trials_budget": record.trials_budget,  # a tag: it may be raised later, and params are final
        "seconds_budget": record.seconds_budget,
        "finished": record.finished,
        "baseline": record.baseline,
        "best": record.best,
        "knee": record.knee,
        "front": ", ".join(map(str, record.front)) or None,
        "optimism_percent": record.choice.optimism_percent if record.choice else None,
    }
    ended = [trial for trial in record.candidates if not trial.result.outcome.unfinished]
    best, bests = math.inf, list[MetricValue]()
    for count, trial in enumerate(sorted(ended, key=lambda each: (_end_ms(each), each.number)), start=1):
        if trial.result.validation and trial.result.outcome is Outcome.COMPLETED:
            best = min(best, trial.result.validation.ne)
        if math.isfinite(best):
            bests.append(MetricValue(count, best, _end_ms(trial)))
    return RunContents(
        name=record.name,
        status=study_status(record),
        start_ms=start,
        end_ms=start + _milliseconds(record.elapsed_seconds) if record.finished else None,
        tags=_texts(tags, TAG_LENGTH),
        params=_texts(dict(_flat(facts)), PARAM_LENGTH),
        series={"study/best_ne": tuple(bests)},
    )


def _trial_tags(trial: TrialRecord, record: StudyRecord) -> dict[str, Any]:
    """Returns what a trial is, what was planned, executed and attempted, and what the study says of it."""
    origin, proposal, plan = trial.origin, trial.origin.proposal, trial.first_plan
    retrained, studied = trial.kind is TrialKind.RETRAINING, origin.reused_from_study
    number = None if retrained else trial.number  # retrainings are numbered apart from trials
    tags: dict[str, Any] = {
        "trial.number": number,
        "kind": trial.kind.value,
        "outcome": trial.result.outcome.value,
        "error": trial.result.error,
        "ranks": trial.plan.ranks,
        "technique.planned": trial.plan.technique,
        "technique.executed": trial.result.technique,
        "technique.forced": plan.restricted_to if plan else None,
        # attempts after one that ran out of memory are planned without it
        "memory_margin": (plan.memory_margin or None) if plan else None,
        "fingerprint": trial.job.fingerprint,
        "proposed.by": (proposal.by or f"line {proposal.line}") if proposal else None,
        "proposed.why": proposal.why if proposal else None,
        **{name: getattr(origin, name) for name in ORIGINS},
        "reused_from_study": f"{studied.directory} trial {studied.trial}" if studied else None,
        "front": number in record.front,
        **{
            name: number is not None and number == getattr(record, name)
            for name in ("best", "knee", "baseline")
        },
        "attempts": len(trial.attempts),
    }
    for index, attempt in enumerate(trial.attempts):
        tags |= {f"attempt.{index}.{name}": getattr(attempt, name) for name in ATTEMPT_WORDS}
    if retrained:
        refit = trial.job.refit is not None or None
        tags |= {KEY: run_key(trial), "of": origin.of, "removed": origin.removed, "refit": refit}
        return tags | {"seed": trial.job.seed, "origin": trial.job.origin}
    if origin.members or origin.retrained_members:
        tags["members"] = ", ".join(map(run_key, record.networks(trial)))
    if record.choice:
        tags["winner"] = ", ".join(winner_reasons(record).get(trial.number, ())) or None
        if judged := record.choice.of(trial.number):
            tags |= {f"choice.{name}": getattr(judged, name) for name in JUDGED}
    if comparison := record.comparison(trial.number):
        values = comparison.to_dict()
        tags |= {f"baseline.{name}": values[name] for name in COMPARED}
    return tags


def _trial_series(trial: TrialRecord, record: StudyRecord) -> Series:
    """Returns a trial's curve, and once it has ended its quality, its cost, what it took, and its seeds'."""
    # until the first candidate begins, the study may yet find a better baseline
    baseline = record.baseline_for(trial) if record.candidates else None
    relative = dict(relative_ne_curve(trial.result.curve, baseline.result.curve)) if baseline else {}
    curves: dict[str, list[MetricValue]] = {}
    for point in trial.result.curve:
        at_point = {
            "ne": point.validation.ne,
            "ne_vs_baseline_percent": relative.get(point.examples),
            "training/loss": point.train_loss,
            "training/learning_rate": point.learning_rate,
            "training/clipped": point.clipped,
            **_quality(point.validation, "validation/"),
        }
        time_ms = _start_ms(trial) + _milliseconds(point.seconds)
        for key, value in _numbers(at_point):
            curves.setdefault(key, []).append(MetricValue(point.examples, value, time_ms))
    series = {key: tuple(readings) for key, readings in curves.items()}
    if trial.result.outcome is Outcome.RUNNING:
        return series
    validation, test = trial.result.validation, trial.result.test
    at_end: dict[str, float | None] = {
        "best_ne": validation.ne if validation else None,
        **_quality(validation, "best/"),
        "test/ne": test.ne if test else None,
        **_quality(test, "test/"),
        **{f"cost/{name}": getattr(trial.job, name) for name in COSTS},
        **{f"plan/{name}": getattr(trial.plan, name) for name in PLANNED},
        **{f"measured/{name}": value for name, value in trial.result.measured.numbers.items()},
        "measured/seconds": trial.result.seconds,
    }
    if trial.kind is not TrialKind.RETRAINING:
        # mean and sample deviation over the seeds from which the whole network was trained again; the training
        # that was chosen is not among them, because it was chosen for its luck too
        refit = bool(record.refits)  # what learnt from validation too, and what did not, has no mean together
        seeds = [
            other.result
            for other in record.retrainings
            if other.origin.of == trial.number and other.result.outcome is Outcome.COMPLETED
            if other.origin.removed is None
            and other.job.origin is None
            and (other.job.refit is not None) == refit
        ]
        at_end["seeds/count"] = len(seeds) or None
        for name, values in (
            ("seeds/best_ne", [seed.validation.ne for seed in seeds if seed.validation]),
            ("seeds/test_ne", [seed.test.ne for seed in seeds if seed.test]),
        ):
            at_end[f"{name}.mean"] = mean(values) if values else None
            at_end[f"{name}.std"] = stdev(values) if len(values) > 1 else None
    if validation and baseline and baseline.result.validation:
        at_end["best_ne_vs_baseline_percent"] = relative_ne_percent(
            validation.ne, baseline.result.validation.ne
        )
    for index, attempt in enumerate(trial.attempts):
        at_end |= {f"attempts/{index}.{name}": getattr(attempt, name) for name in ATTEMPT_NUMBERS}
    return series | {key: (MetricValue(0, value, _end_ms(trial)),) for key, value in _numbers(at_end)}


def _quality(metrics: Metrics | None, prefix: str) -> dict[str, float | None]:
    """Returns quality beside NE."""
    names = ("log_loss", "auc", "calibration")
    return {f"{prefix}{name}": getattr(metrics, name) for name in names} if metrics else {}


def _numbers(values: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    return (
        (key, float(value)) for key, value in values.items() if value is not None and math.isfinite(value)
    )


def _start_ms(trial: TrialRecord) -> int:
    started = trial.origin.started_at
    return _milliseconds(datetime.fromisoformat(started).timestamp()) if started else 0


def _end_ms(trial: TrialRecord) -> int:
    return _start_ms(trial) + _milliseconds(trial.result.seconds)


def _milliseconds(seconds: float | None) -> int:
    return round(1000 * seconds) if seconds is not None and math.isfinite(seconds) else 0


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields leaves by dotted path; a list of plain values is one leaf."""
    if isinstance(data, Mapping):
        children: Any = data.items()
    elif isinstance(data, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in data):
        children = enumerate(data)
    else:
        yield path, data
        return
    for key, value in children:
        yield from _flat(value, f"{path}.{key}" if path else str(key))


def _texts(values: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Returns values as MLflow takes them: other characters in names replaced, unknown ones left out."""
    return {
        re.sub(r"[^\w.\-/: ]", "_", key)[:250]: _text(value, limit)
        for key, value in values.items()
        if value is not None
    }


def _text(value: Any, limit: int) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


# How MLflow's pages of a study open: as shared views, which MLflow keeps in tags of the experiment.
#
# MLflow nests runs below their parents only in the order of time, and its page of charts has its sections in
# alphabetical order, all of them open. So there is a view for each way to look at a study, in all of which the
# charts that matter, above all NE by FLOPs, are the first.

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
