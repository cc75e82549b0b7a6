"""What an MLflow run says of a trial or of a study: plain values made from the records, without MLflow.

Time stamps come from the record, so that writing a sheet twice leaves the same rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dhen.values import dump_yaml
from trials.mlflow.series import Series, end_ms, milliseconds, start_ms, study_series, trial_series
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord

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
    """Returns the run of one trial; `model_name` says its architecture in short."""
    ended = trial.result.outcome is not Outcome.RUNNING
    config = {"model": trial.job.model, "training": trial.job.training}
    # by which MLflow's table groups a trial and its seeds
    names = {"model": model_name or None, "configuration": f"{_what(trial)} {model_name}".rstrip()}
    return RunContents(
        name=_run_name(trial, record, model_name),
        status=STATUS.get(trial.result.outcome, "FAILED"),
        start_ms=start_ms(trial),
        end_ms=end_ms(trial) if ended else None,
        tags=_texts(_trial_tags(trial, record) | _attempt_tags(trial) | names, TAG_LENGTH),
        params=_texts({**trial.point, **dict(_flat(config))}, PARAM_LENGTH),
        series=trial_series(trial, record),
        artifacts={"config.yaml": dump_yaml(config)}
        | ({"cost.csv": _cost_csv(trial)} if trial.job.cost else {})
        | ({"plan.json": _plan_json(trial, record)} if trial.plan.summary else {}),
    )


def study_sheet(record: StudyRecord) -> RunContents:
    """Returns the parent run: the study's settings, and the best NE after each candidate that ended."""
    start = min((start_ms(trial) for trial in record.trials), default=0)
    facts = {
        "space": record.space,
        "sampler": record.sampler,
        "seed": record.seed,
        # columns are in MLflow's dataset of the log
        "log": {name: value for name, value in record.log.to_dict().items() if name != "columns"},
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
        end_ms=start + milliseconds(record.elapsed_seconds) if record.finished else None,
        tags=_texts(tags, TAG_LENGTH),
        params=_texts(dict(_flat(facts)), PARAM_LENGTH),
        series=study_series(record),
        artifacts={},
    )


def run_key(trial: TrialRecord) -> str:
    """Returns the key by which a trial's run is known among all runs of the study."""
    return f"{KEY} {trial.number}" if trial.kind is TrialKind.RETRAINING else str(trial.number)


def _run_name(trial: TrialRecord, record: StudyRecord, model_name: str) -> str:
    """Returns `#7 2x[attention+dlrm] concat d16`; of a retraining `#7 seed 3 2x[attention+dlrm] concat d16`.

    MLflow's table shows some twenty characters of a name. The number comes first and is short, so that names
    differ there, also where architectures begin alike.
    """
    words = [_what(trial)]
    if trial.kind is TrialKind.RETRAINING:
        words.append(f"seed {trial.job.seed}")
    start = " ".join(words)
    baseline = " baseline" if _is_of_baseline(trial, record) else ""
    model = _text(model_name, NAME_LENGTH - len(start) - len(baseline) - 1)
    return f"{start} {model}".rstrip() + baseline


def _what(trial: TrialRecord) -> str:
    """Returns what a trial and its retrainings from other seeds have in common: `#7`, `#7 without layer 1`."""
    removed = f" without {trial.origin.removed}" if trial.origin.removed else ""
    retrained = trial.kind is TrialKind.RETRAINING
    rows = f" first {trial.job.origin:,} rows" if retrained and trial.job.origin is not None else ""
    refit = " refit" if trial.job.refit is not None else ""
    return f"#{trial.network_of}{removed}{rows}{refit}"


def _is_of_baseline(trial: TrialRecord, record: StudyRecord) -> bool:
    own = trial.network_of
    return any(other.number == own and other.kind is TrialKind.BASELINE for other in record.trials)


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
            "refit": trial.job.refit is not None or None,
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
        "ranks": trial.plan.ranks,
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
            "replaced": attempt.replaced,
            "slow_rank": attempt.slow_rank,
        }
        tags |= {f"attempt.{number}.{name}": value for name, value in attempt_values.items()}
    return tags


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
