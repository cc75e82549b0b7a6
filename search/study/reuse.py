"""What earlier studies of the same log have learned, in the terms of this one: `warm_start=runs/a`.

A candidate is reused if its network and the training settings that the space decides are a point of this
study's space, and if all else that its training goes by is equal: then its NE is one that this study could
have measured (with another seed, perhaps). The rest is left with a reason. Reused candidates are told to the
sampler before its first proposal. They are no trials of this study: their numbers are below 0, and they count
neither in its budget nor on its front. What was read is noted with the study when it begins
(`search.study.settings`), so that a resumed one goes by the same, whatever has become of the earlier ones.

The front of those that are reused is proposed again, right after the space's own start points and the lowest
NE first, so that it is on this study's front too: if the very same job was done there (seed included), its
result and weights are taken over and nothing is trained; of the others a few are trained here. What the
sampler proposes later is treated alike: an equal job is taken over, any other is trained, also if the
earlier study knows the network from another seed.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from dhen.atomic_write import atomic_file
from dhen.config import DhenConfig
from dhen.errors import UserError
from dhen.model import parse_model
from dhen.values import Value, load_yaml, parse
from search.config import StudyConfig
from search.execution.trainer import trained_job
from search.log_config import LogConfig
from search.read_study import read_study
from search.run_directory import CHECKPOINTS, STUDY_FILE, folder_of, trial_folder
from search.samplers.optuna_samplers import FIRST_GENERATION
from search.selection import eligible, pareto_front
from search.study_state import StudyState
from spaces.axes import OutsideError
from spaces.nearest import nearest_point
from spaces.space import Candidate, Point, Space
from trials.data.prepared_log import PreparedLog
from trials.records.events import WEIGHTS, logits_file
from trials.records.job import Job, TrainingConfig
from trials.records.study_record import EarlierStudy, LogSummary, StudyRecord
from trials.records.trial_record import Origin, Outcome, StudyTrial, TrialKind, TrialRecord

# What was best in earlier studies of other logs, as start points: `start_from=runs/last-week`.
#
# NE on another log says nothing here, so the sampler learns nothing of these studies (`warm_start` is for those
# of the same log). But what won on a log that is like this one, with the settings that it was trained with, is
# worth a candidate.

MOST = 3
"""Networks of one study that are taken, at most: this study's budget is for what is new."""


def points_of(space: Space, records: Iterable[StudyRecord]) -> list[Point]:
    """Start points from studies of any log: the best, the knee and the rest of the front by NE, three networks of
    each study at most, as the nearest that the space has. Points may leave axes open."""
    points: list[Point] = []
    for record in records:
        winners = (record.best, record.knee, *reversed(record.front))
        networks = (
            network
            for number in winners
            if number is not None
            for network in record.networks(record.trial(number))
        )
        for trial in list({network.job.fingerprint: network for network in networks}.values())[:MOST]:
            training = parse(TrainingConfig, trial.job.training, record.directory)
            point = nearest_point(space, parse_model(trial.job.model, record.directory), dict(training))
            if point not in points:
                points.append(point)
    return points


def next_point(points: Iterable[Point], proposed: Collection[TrialRecord]) -> Point:
    """The first of the points that none of these candidates has; empty past the last."""
    tried = [trial.point.items() for trial in proposed]
    return next((point for point in points if not any(point.items() <= known for known in tried)), {})


def read_other_study(name: str) -> StudyRecord:
    """The study in a directory that `start_from` names.

    Raises:
        UserError: if there is none, or none of its candidates has a result.
    """
    try:
        record = read_study(Path(name))
    except UserError as error:
        raise UserError(f"start_from: {error}") from None
    if not record.front:
        raise UserError(
            f"start_from: {name}: none of its candidates has a result so far; name another study."
        )
    return record


FOUND_OUT = "auto"
"""What a setting is before the log decides it."""
OUTSIDE, OTHERWISE, NO_RESULT = "outside this space", "trained otherwise", "without a result"
"""Why a candidate is not reused."""
NO_MEMORY = (Outcome.INFEASIBLE, Outcome.OUT_OF_MEMORY)
USABLE = (Outcome.COMPLETED, Outcome.STOPPED, Outcome.DIVERGED, *NO_MEMORY)
TRAINED_AGAIN = 4
"""Members of the earlier front that this study trains itself, at most: its budget is for what is new."""

JobOf = Callable[[Candidate], Job]
"""This study's job of a candidate."""
Planned = Callable[[TrialRecord, Job], TrialRecord]
"""A record with its plan for this study's cluster; what fits nowhere is infeasible."""
COPIED_AT_ONCE_BYTES = 2**20


class FileStamp(NamedTuple):
    """Size and time of a file, by which it is known again: another training in the same place has another
    stamp."""

    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, state: os.stat_result) -> FileStamp:
        """Returns the stamp of a file."""
        return cls(state.st_size, state.st_mtime_ns)


class EarlierResults(Value):
    """Results of earlier studies that a study began with."""

    studies: tuple[EarlierStudy, ...] = ()
    records: tuple[TrialRecord, ...] = ()
    """Candidates of earlier studies as points of this space, with the fingerprints of their own jobs, numbered
    ... -2, -1; `reused_from_study` says whose."""
    weights: dict[int, FileStamp] = Field(default_factory=dict)
    """Stamps of the weight files that the candidates left, by the candidate's number."""


class WarmStart:
    """What one study has of earlier ones."""

    def __init__(self, reused: EarlierResults, space: Space, job_of: JobOf) -> None:
        """`job_of` makes this study's jobs."""
        self.records = reused.records
        """Candidates of earlier studies, for the sampler."""
        self._weights = reused.weights
        self._completed = {
            record.job.fingerprint: record
            for record in reused.records
            if record.result.outcome is Outcome.COMPLETED
        }
        self.starts: list[Point] = []
        """Points of the earlier front, which are proposed first."""
        trained = 0
        for record in reversed(pareto_front(reused.records)):
            job = job_of(space.decode(record.point)).fingerprint
            trained += job not in self._completed
            if job in self._completed or trained <= TRAINED_AGAIN:
                self.starts.append(record.point)

    def result(self, record: TrialRecord) -> TrialRecord | None:
        """The record of a trial that is about to start, with what an equal job has brought there."""
        known = self._completed.get(record.job.fingerprint)
        if known is None:
            return None
        return record.with_result_of(known, reused_from_study=known.origin.reused_from_study)

    def fetch_weights(self, record: TrialRecord, target: Path) -> bool:
        """Copies the weights of a result from where it was trained; whether they are at `target` now."""
        known = self._completed.get(record.job.fingerprint)
        if record.origin.reused_from_study is None or known is None or known.number not in self._weights:
            return False
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with weights_there(known).open("rb") as opened:
                # the stamp of the opened file, not of the path, which may be replaced at any moment
                if FileStamp.of(os.fstat(opened.fileno())) != self._weights[known.number]:
                    return False
                with atomic_file(target) as copy, copy.open("wb") as file:
                    shutil.copyfileobj(opened, file, COPIED_AT_ONCE_BYTES)
        except OSError:  # that study has just found a better one, or its directory is out of reach
            return False
        return True


def earlier_study(name: str) -> StudyRecord:
    """The study in a directory that `warm_start` names.

    Raises:
        UserError: if there is none, or nothing was trained.
    """
    try:
        return read_study(Path(name))
    except UserError as error:
        raise UserError(f"warm_start: {error}") from None


class _NotReusedError(Exception):
    """A candidate is not reused: why, and what exactly."""


def read_reused(
    config: StudyConfig, log: PreparedLog, space: Space, job_of: JobOf, planned: Planned
) -> EarlierResults:
    """Results of all directories of `warm_start`, in their order; a job that several have counts once.

    Raises:
        UserError: for a directory without a study or with nothing trained, and for a study of another log.
    """
    found: dict[str, TrialRecord] = {}
    studies = []
    for name in config.warm_start:
        there = earlier_study(name)
        _check_log(name, there.log, log.summary(), config)
        left: dict[str, Counter[str]] = {}
        reused = 0
        promoted = (trial for trial in there.promoted if trial.kind is TrialKind.CANDIDATE)
        candidates = (*there.candidates, *promoted)
        for trial in candidates:
            try:
                here = _here(trial, there, log, space, job_of, planned)
                known = found.setdefault(trial.job.fingerprint, here)
                if known.result.outcome is not Outcome.COMPLETED and here.result.outcome is Outcome.COMPLETED:
                    found[trial.job.fingerprint] = here
                reused += 1
            except _NotReusedError as error:
                group, reason = error.args
                left.setdefault(group, Counter())[reason] += 1
        studies.append(
            EarlierStudy(
                directory=name, seed=there.seed, candidates=len(candidates), reused=reused, left=left
            )
        )
    records = [record.replace(number=number) for number, record in enumerate(found.values(), -len(found))]
    stamps = {
        record.number: FileStamp.of(path.stat())
        for record in records
        if (path := weights_there(record)).exists()
    }
    return EarlierResults(studies=tuple(studies), records=tuple(records), weights=stamps)


def weights_there(record: TrialRecord) -> Path:
    """Where a reused candidate's training left its weights, if they are still there."""
    assert record.origin.reused_from_study is not None
    return (
        trial_folder(Path(record.origin.reused_from_study.directory), record.origin.reused_from_study.trial)
        / WEIGHTS
    )


def _here(
    trial: TrialRecord, study: StudyRecord, log: PreparedLog, space: Space, job_of: JobOf, planned: Planned
) -> TrialRecord:
    """A candidate of an earlier study as this one would have it.

    Raises:
        _NotReusedError: if it would not.
    """
    if trial.result.outcome not in USABLE or not trial.job.model:
        raise _NotReusedError(NO_RESULT, trial.result.outcome.value)
    if trial.result.outcome is Outcome.COMPLETED and not eligible([trial]):
        raise _NotReusedError(NO_RESULT, "NE is no number")
    if trial.result.measured.cut_after is not None:
        raise _NotReusedError(NO_RESULT, "its time was over before its end")
    try:
        job = trained_job(trial, log)
        assert isinstance(job.model, DhenConfig)
        training = {key: getattr(job.training, key) for key in space.training_axes}
        for key, axis in space.training_axes.items():
            if axis.size > 1 and axis.has(FOUND_OUT) and not axis.has(training[key]):
                training[key] = FOUND_OUT  # what was found out there is left to be found out here
        candidate = Candidate(model=job.model, training=training)
        point = space.encode(candidate)
        own = job_of(candidate)
    except OutsideError as error:
        raise _NotReusedError(OUTSIDE, error.shortly) from None
    except UserError as error:
        raise _NotReusedError(OUTSIDE, str(error).rstrip(".")) from None
    # more than the seed differs
    if job.fingerprint != trial.job.fingerprint:
        raise _NotReusedError(OTHERWISE, "by another version of dhen-search")
    pairs = {key: (getattr(job.training, key), here) for key, here in own.training}
    pairs["period"] = job.period, own.period
    differ = [f"{key} {there}, here {here}" for key, (there, here) in pairs.items() if there != here]
    if differ:
        raise _NotReusedError(OTHERWISE, "; ".join(differ))
    origin = StudyTrial(study=study.name, directory=str(Path(study.directory).resolve()), trial=trial.owner)
    # without the verdicts of that study's memory and limits
    judged = trial.with_plan(serving_ms=None, serving_excess=None)
    if trial.result.outcome is Outcome.INFEASIBLE:
        judged = judged.with_result(outcome=Outcome.RUNNING)
    record = planned(judged, own)
    if trial.result.outcome in NO_MEMORY and record.result.outcome is not Outcome.INFEASIBLE:
        raise _NotReusedError(NO_RESULT, f"{trial.result.outcome.value.replace('_', ' ')} there, not here")
    return TrialRecord(
        number=trial.number,
        kind=trial.kind,
        point=point,
        origin=Origin(
            started_at=trial.origin.started_at, reused_from_study=origin, sampler_notes=FIRST_GENERATION
        ),
        job=record.job.replace(cost=()),  # the sampler needs no cost table, and thousands may be noted
        plan=record.plan.replace(summary=None),
        result=record.result.replace(test=None),
    )


def _check_log(name: str, there: LogSummary, here: LogSummary, config: StudyConfig) -> None:
    if there.fingerprint == here.fingerprint:
        return
    apart = ("fingerprint", "ne_floor", "base_rate")
    pairs = {
        key: (getattr(there, key), getattr(here, key)) for key in LogSummary.model_fields if key not in apart
    }
    # settings by which a log is found and prepared
    read_there, read_here = load_yaml(Path(name) / STUDY_FILE), config.to_dict()
    pairs |= {
        key: (read_there.get(key), read_here[key]) for key in LogConfig.model_fields if key in read_there
    }
    differ = [f"{key} {_words(a)} there, {_words(b)} here" for key, (a, b) in pairs.items() if a != b]
    raise UserError(
        f"warm_start: {name} is a study of another log: its fingerprint is {there.fingerprint}, this log's "
        f"{here.fingerprint}. What differs: {'; '.join(differ) or 'the values of the rows, or their schema'}. "
        "NE on different data cannot be compared; name studies of this log, prepared alike."
    )


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in value.items())
    return " ".join(value) if isinstance(value, list) else f"{value}"


# Weights in a run directory: of the trials that may be exported, alone or in an average.


class WinnerWeights:
    """The weights of one study's trials."""

    def __init__(self, directory: Path, state: StudyState, warm_start: WarmStart) -> None:
        """Weights in a run directory; `warm_start` has the weights of results that were taken over."""
        self._directory, self._state, self._warm_start = directory, state, warm_start
        self._with_weights = set(state.trials)

    def has(self, network: TrialRecord) -> bool:
        """Whether a network's weights are here; fetched now, if another study has them."""
        file = self.file(network)
        if file.exists() or network.kind is TrialKind.RETRAINING:
            return file.exists()
        owner = self._state.trials[network.owner]
        return self._warm_start.fetch_weights(owner, file)

    def file(self, network: TrialRecord) -> Path:
        """The weights file of a trial, of the trial whose result it shares, or of a retraining."""
        return folder_of(self._directory, network) / WEIGHTS

    def logits(self, network: TrialRecord, split: str) -> Path:
        """The file of a network's logits on a split, if it was scored there with `keep_logits`."""
        return logits_file(folder_of(self._directory, network), split)

    def have_logits(self, network: TrialRecord, split: str) -> bool:
        """Whether the file of logits is there, and no older than the weights."""
        logits, weights = self.logits(network, split), self.file(network)
        return logits.exists() and logits.stat().st_mtime_ns >= weights.stat().st_mtime_ns

    def keep(self, trial: TrialRecord) -> None:
        """Takes in a trial that has ended: fetches its weights, if it may be exported and another study
        has them."""
        if trial.origin.reused_from_study is not None and trial in self._state.selection.kept:
            self.has(trial)  # now, before that study drops them or is deleted
        shutil.rmtree(trial_folder(self._directory, trial.number) / CHECKPOINTS, ignore_errors=True)
        self.note(trial)

    def note(self, trial: TrialRecord) -> None:
        """Knows of a trial that has ended, whoever has trained it."""
        self._with_weights.add(trial.number)

    def drop(self, running: Collection[int] | None = None) -> None:
        """Drops weights that are not wanted any more; in a search that goes on, running trials and trials on all
        rows keep theirs."""
        promoted = self._state.promoted if running is not None else []
        kept = {trial.owner for trial in (*self._state.selection.kept, *promoted)}
        for number in self._with_weights - kept - self._state.unfinished - set(running or ()):
            (trial_folder(self._directory, number) / WEIGHTS).unlink(missing_ok=True)
        self._with_weights = kept
