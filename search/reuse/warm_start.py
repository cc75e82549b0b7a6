"""What earlier studies of the same log have learned, in the terms of this one: `warm_start=runs/a`.

A candidate is reused where its network and the training settings that the space decides are a point of this
study's space, and where all else that its training goes by is equal: then its NE is one that this study could
have measured (with another seed, perhaps). The rest is left with a reason. Reused candidates are told to the
sampler before its first proposal. They are no trials of this study: their numbers are below 0, and they count
neither in its budget nor on its front. What was read is noted with the study when it begins
(`search.study.settings`), so that a resumed one goes by the same, whatever has become of the earlier ones.
`search.reuse.earlier` says what else is done with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from dhen.config import DhenConfig
from dhen.errors import UserError
from dhen.values import Value, load_yaml
from search.bundles.export import trained_job
from search.config import LogConfig, StudyConfig
from search.pareto import eligible
from search.run_directory import STUDY_FILE, read_record, trial_folder
from search.samplers.nsga2 import FIRST_GENERATION
from spaces.axes import OutsideError
from spaces.space import Candidate, Space
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS
from trials.job import Job
from trials.record import EarlierStudy, LogSummary, Origin, Outcome, StudyRecord, TrialKind, TrialRecord
from trials.serving_limits import weights_bytes
from trials.storage.shared_ledger import Stamp

FOUND_OUT = "auto"
"""What a setting is before the log decides it."""
OUTSIDE, OTHERWISE, NO_RESULT = "outside this space", "trained otherwise", "without a result"
"""Why a candidate is left."""
NO_MEMORY = (Outcome.INFEASIBLE, Outcome.OUT_OF_MEMORY)
USABLE = (Outcome.COMPLETED, Outcome.STOPPED, Outcome.DIVERGED, *NO_MEMORY)
RESULTS_ALONE: dict[str, Any] = {"cost": (), "plan": None, "attempts": (), "test": None} | dict.fromkeys(
    ("reused_from", "promoted_from", "tuned_from")
)
"""Of a record that is kept for the sampler, what is not needed."""

JobOf = Callable[[Candidate], Job]
"""This study's job of a candidate."""
Planned = Callable[[TrialRecord, Job], TrialRecord]
"""A record with its plan for this study's cluster; what fits nowhere is infeasible."""


class Reused(Value):
    """What a study began with."""

    studies: tuple[EarlierStudy, ...] = ()
    records: tuple[TrialRecord, ...] = ()
    """Candidates of earlier studies as points of this space, with the fingerprints of their own jobs, numbered
    ... -2, -1; `reused_from_study` says whose."""
    weights: dict[int, Stamp] = Field(default_factory=dict)
    """By what the files of those that left some are known again."""


class _LeftError(Exception):
    """A candidate is not reused: why, and what exactly."""


def read_reused(
    config: StudyConfig, log: PreparedLog, space: Space, job_of: JobOf, planned: Planned
) -> Reused:
    """Of all directories of `warm_start`, in their order; a job that several have counts once.

    Raises:
        UserError: for a directory without a study or with nothing trained, and for a study of another log.
    """
    found: dict[str, TrialRecord] = {}
    studies = []
    for name in config.warm_start:
        there = _study(Path(name))
        _check_log(name, there.log, log.summary(), config)
        left: dict[str, Counter[str]] = {}
        reused = 0
        promoted = (trial for trial in there.promoted if trial.kind is TrialKind.CANDIDATE)
        candidates = (*there.candidates, *promoted)
        for trial in candidates:
            try:
                found.setdefault(trial.fingerprint, _here(trial, there, log, space, job_of, planned))
                reused += 1
            except _LeftError as error:
                group, reason = error.args
                left.setdefault(group, Counter())[reason] += 1
        studies.append(
            EarlierStudy(
                directory=name, seed=there.seed, candidates=len(candidates), reused=reused, left=left
            )
        )
    records = [record.replace(number=number) for number, record in enumerate(found.values(), -len(found))]
    stamps = {record.number: stamp for record in records if (stamp := _stamp(record)) is not None}
    return Reused(studies=tuple(studies), records=tuple(records), weights=stamps)


def weights_there(record: TrialRecord) -> Path:
    """Where a reused candidate's training left its weights, if they are still there."""
    assert record.reused_from_study is not None
    return trial_folder(Path(record.reused_from_study.directory), record.reused_from_study.trial) / WEIGHTS


def _study(directory: Path) -> StudyRecord:
    try:
        return read_record(directory)
    except UserError as error:
        raise UserError(f"warm_start: {error}") from None


def _here(
    trial: TrialRecord, there: StudyRecord, log: PreparedLog, space: Space, job_of: JobOf, planned: Planned
) -> TrialRecord:
    """A candidate of an earlier study as this one would have it.

    Raises:
        _LeftError: where it would not.
    """
    if trial.outcome not in USABLE or not trial.model:
        raise _LeftError(NO_RESULT, trial.outcome.value)
    if trial.outcome is Outcome.COMPLETED and not eligible([trial]):
        raise _LeftError(NO_RESULT, "NE is no number")
    try:
        job = trained_job(trial, log, there.seed)
        candidate = _candidate(job, space)
        point = space.encode(candidate)
        own = job_of(candidate)
    except OutsideError as error:
        raise _LeftError(OUTSIDE, error.shortly) from None
    except UserError as error:
        raise _LeftError(OUTSIDE, str(error).rstrip(".")) from None
    _check_training(trial, job, own)
    origin = Origin(study=there.name, directory=str(Path(there.directory).resolve()), trial=trial.owner)
    notes = {"point": point, "reused_from_study": origin, "sampler_notes": FIRST_GENERATION}
    record = planned(trial.replace(**(notes | _to_be_judged(trial))), own)
    if trial.outcome in NO_MEMORY and record.outcome is not Outcome.INFEASIBLE:
        raise _LeftError(NO_RESULT, f"{trial.outcome.value.replace('_', ' ')} there, not here")
    return record.replace(**RESULTS_ALONE)


def _to_be_judged(trial: TrialRecord) -> dict[str, Any]:
    """What only that study's memory and limits of serving say of it."""
    size = trial.weights_bytes if trial.weights_bytes is not None else weights_bytes(trial.cost)
    found: dict[str, Any] = {"weights_bytes": size, "serving_ms": None, "serving_excess": None}
    return found | ({"outcome": Outcome.RUNNING} if trial.outcome is Outcome.INFEASIBLE else {})


def _candidate(job: Job, space: Space) -> Candidate:
    """What it was there; a setting that was found out there is left to be found out here (`_check_training`)."""
    assert isinstance(job.model, DhenConfig)
    training = {key: getattr(job.training, key) for key in space.training_axes}
    for key, axis in space.training_axes.items():
        if axis.holds(FOUND_OUT) and not axis.holds(training[key]):
            training[key] = FOUND_OUT
    return Candidate(model=job.model, training=training)


def _check_training(trial: TrialRecord, job: Job, own: Job) -> None:
    """All but the seed is equal."""
    if job.fingerprint != trial.fingerprint:
        raise _LeftError(OTHERWISE, "by another version of dhen-search")
    pairs = {key: (getattr(job.training, key), here) for key, here in own.training}
    differ = [f"{key} {there}, here {here}" for key, (there, here) in pairs.items() if there != here]
    if differ:
        raise _LeftError(OTHERWISE, "; ".join(differ))


def _stamp(record: TrialRecord) -> Stamp | None:
    path = weights_there(record)
    return Stamp.of(path.stat()) if path.exists() else None


def _check_log(name: str, there: LogSummary, here: LogSummary, config: StudyConfig) -> None:
    if there.fingerprint == here.fingerprint:
        return
    known = LogSummary.model_fields.keys() - {"fingerprint", "ne_floor", "base_rate"}
    pairs = {
        key: (getattr(there, key), getattr(here, key)) for key in LogSummary.model_fields if key in known
    }
    pairs |= _read_otherwise(Path(name), config)
    differ = [f"{key} {_words(a)} there, {_words(b)} here" for key, (a, b) in pairs.items() if a != b]
    raise UserError(
        f"warm_start: {name} is a study of another log: its fingerprint is {there.fingerprint}, this log's "
        f"{here.fingerprint}. What differs: {'; '.join(differ) or 'the values of the rows, or their schema'}. "
        "NE on different data cannot be compared; name studies of this log, prepared alike."
    )


def _read_otherwise(directory: Path, config: StudyConfig) -> dict[str, tuple[Any, Any]]:
    """Settings by which a log is found and prepared, there and here."""
    there, here = load_yaml(directory / STUDY_FILE), config.to_dict()
    return {key: (there.get(key), here[key]) for key in LogConfig.model_fields if key in there}


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each:,}" for key, each in value.items())
    return " ".join(value) if isinstance(value, list) else f"{value}"
