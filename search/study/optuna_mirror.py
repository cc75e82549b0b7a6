"""OptunaMirror: keeps an Optuna study equal to the record, for those who look at it with Optuna's tools.

Its trials are the candidates that are points of the space. What is no point of it (the baseline, averages,
networks that learnt from one, trainings on all rows, proposals outside the space) stands in attributes of the
study: as trials without parameters they would leave Optuna's charts no parameter that all trials have.

Optuna takes nothing back of a trial that has ended. So each sync adds what is new, moves on what runs, and
only where the record contradicts what stands there (a trial was trained again, a choice has more values) the
study is made anew. The ledger stays the truth: nothing is ever read from here
(docs/decisions/0033-optuna-mirror.md).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dashboards.names import known, trial_name
from dashboards.rows import shared_with
from dhen.errors import UserError
from search.execution.growth import space_of
from search.study.optuna_storage import WrittenStudy, distributions_of, in_words, open_storage, shown
from spaces.axes import Axis, Choice, label
from spaces.space import Point, Space
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState


# What Optuna is told of one candidate: a trial with state, values, curve, constraints and attributes.

NUMBER = "trial"
"""User attribute with the trial's number in the study; Optuna counts candidates alone, from 0 on."""
DIGEST = "dhen_search:digest"
"""System attribute by which a mirrored trial is known to say still what the record says."""
CONSTRAINTS = "constraints"
"""System attribute that Optuna and optuna-dashboard read: a list of numbers, feasible at 0 or less."""
CONSTRAINT_NAMES = ("memory", "serving")
"""What the constraints are, in this order: `TrialPlan.memory_excess` and `TrialPlan.serving_excess`."""
FINISHED_AS = {
    Outcome.COMPLETED: "COMPLETE",
    Outcome.STOPPED: "PRUNED",
    Outcome.INFEASIBLE: "PRUNED",
    Outcome.OUT_OF_MEMORY: "PRUNED",
    Outcome.INTERRUPTED: "PRUNED",
}
"""States of Optuna by outcome; diverged and failed trials are FAIL. A candidate that could not be trained has no
NE, which Optuna demands of what is complete, and did not fail: it was given up, as one is that was cut short."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate as Optuna is to have it."""

    number: int
    """Number of the trial in the study."""
    state: str
    """Name of Optuna's state."""
    values: tuple[float, float] | None
    """NE and FLOPs, of a completed trial alone."""
    params: Point
    curve: dict[int, float]
    """NE on validation by number of examples."""
    attributes: dict[str, Any]
    constraints: list[float] | None
    started: datetime | None
    ended: datetime | None

    @property
    def finished(self) -> bool:
        """Whether the trial has ended, so that Optuna takes no more of it."""
        return self.state != "RUNNING"

    @property
    def digest(self) -> str:
        """A hash of all that must not change once the trial has ended; times are not among it, as Optuna notes its
        own for a trial that it saw running."""
        said = (self.state, self.values, self.params, self.curve, self.attributes, self.constraints)
        # sorted: a database may give the keys of a point back in another order
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def system_attributes(self) -> dict[str, Any]:
        """What Optuna keeps beside the attributes for people."""
        return {DIGEST: self.digest} | ({} if self.constraints is None else {CONSTRAINTS: self.constraints})

    def optuna_state(self) -> TrialState:
        """Returns the state as Optuna's own value."""
        from optuna.trial import TrialState

        state: TrialState = TrialState[self.state]
        return state

    def frozen(self, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        """Returns the trial as Optuna takes it in whole, with its times.

        Args:
            distributions: distributions of the space's axes, by name.
        """
        from optuna.trial import create_trial

        trial: FrozenTrial = create_trial(
            state=self.optuna_state(),
            values=self.values,
            params=self.params,
            distributions={name: distributions[name] for name in self.params},
            user_attrs=self.attributes,
            system_attrs=self.system_attributes,
            intermediate_values=self.curve,
        )
        trial.datetime_start = self.started or trial.datetime_start
        trial.datetime_complete = (self.ended or trial.datetime_start) if self.finished else None
        return trial


def row_of(trial: TrialRecord, *, resumes: bool = False) -> Row:
    """Returns what Optuna is told of a candidate that has a point of the space.

    Args:
        trial: the candidate.
        resumes: whether it was cut short and trains again when its study goes on, so that it has not ended.
    """
    result, started = trial.result, local_time(trial.origin.started_at)
    quality = result.validation
    comparable = result.outcome is Outcome.COMPLETED and quality is not None and known(quality.ne)
    running = resumes or result.outcome is Outcome.RUNNING
    state = "RUNNING" if running else FINISHED_AS.get(result.outcome, "FAIL")
    if state == "COMPLETE" and not comparable:
        state = "FAIL"
    assert quality is not None or state != "COMPLETE"
    return Row(
        number=trial.number,
        state=state,
        values=(quality.ne, trial.job.flops or 0.0) if quality is not None and comparable else None,
        params=dict(trial.point),
        curve=dict(zip(result.curve.examples, result.curve.ne, strict=True)),
        attributes=attributes_of(trial),
        constraints=_constraints(trial),
        started=started,
        ended=started + timedelta(seconds=result.seconds or 0.0) if started else None,
    )


def attributes_of(trial: TrialRecord) -> dict[str, Any]:
    """Returns what the record says of a trial beside what Optuna has fields for; without what is not known."""
    origin, job, plan, result = trial.origin, trial.job, trial.plan, trial.result
    quality, measured = result.validation, result.measured
    facts = {
        NUMBER: trial.number,
        "outcome": result.outcome.value,
        "architecture": trial_name(trial),
        "kind": trial.kind.value,
        "flops": job.flops,
        "parameters": job.parameters,
        "table_bytes": job.table_bytes,
        "technique_planned": plan.technique,
        "technique_executed": result.technique,
        "peak_memory_bytes_predicted": plan.peak_bytes,
        "peak_memory_bytes_measured": measured.peak_memory_bytes,
        "forward_ms": plan.serving_ms,
        "ne": quality.ne if quality and known(quality.ne) else None,
        "auc": quality.auc if quality and known(quality.auc) else None,
        "calibration": quality.calibration if quality and known(quality.calibration) else None,
        "examples_per_second": measured.examples_per_second,
        "seconds": result.seconds,
        "tuned_from": origin.tuned_from,
        "shares_result_of": shared_with(trial),
        "proposed_by": origin.proposal.by if origin.proposal else None,
        "error": result.error,
        "mlflow_filter": f"tags.`trial.number` = '{trial.number}'",
    }
    # as the storage gives it back: numbers as JSON has them
    known_facts = {key: value for key, value in facts.items() if value is not None}
    plain: dict[str, Any] = json.loads(json.dumps(known_facts))
    return plain


def local_time(moment: str | None) -> datetime | None:
    """Returns a moment in ISO 8601 as Optuna notes times: local, and without a zone."""
    return datetime.fromisoformat(moment).astimezone().replace(tzinfo=None) if moment else None


def _constraints(trial: TrialRecord) -> list[float] | None:
    """The excesses in the order of their names, 0 for one that is not known; None if none is."""
    excesses = [trial.plan.memory_excess, trial.plan.serving_excess]
    if all(excess is None for excess in excesses):
        return None
    return [0.0 if excess is None else excess for excess in excesses]


"""A function from a study's record to its space, as wide as the study has made it."""
OBJECTIVES = ("NE", "FLOPs")
IDENTITY = "dhen_search"
"""User attribute of the study that says whose mirror it is."""


@dataclass(kw_only=True)
class _Mirrored:
    """A trial as it stands in the storage."""

    id: int
    finished: bool
    digest: str
    curve: set[int] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)


class OptunaMirror:
    """Writes one study into a storage of Optuna."""

    def __init__(self, storage: str, *, name: str | None = None) -> None:
        """A mirror that is not open yet: the first `sync` opens it.

        Args:
            storage: a SQLAlchemy URL, or the path of a journal file.
            name: name of the Optuna study; by default the study's own.
        """
        self._url, self._name = storage, name
        self._storage: BaseStorage | None = None
        self._close: Callable[[], None] = lambda: None
        self._study: Study | None = None
        self._space: tuple[tuple[GrownAxis, ...], Space] | None = None
        """The space as it was read last, with the steps by which it had grown."""
        self._mirrored: dict[int, _Mirrored] = {}
        self._rows: dict[int, tuple[TrialRecord, bool, Row]] = {}
        self._distributions: dict[str, BaseDistribution] = {}
        self._standing: dict[str, BaseDistribution] = {}
        """Distributions that the newest trials in the storage have."""
        self._told: dict[str, Any] = {}
        """Attributes of the study as the storage has them."""

    def sync(self, record: StudyRecord) -> WrittenStudy:
        """Makes the Optuna study agree with the record, and returns what stands there now.

        Raises:
            UserError: if the storage cannot be used, or a study of this name there is not this one's mirror.
                What was not written then is written by the next call.
        """
        import optuna

        with in_words(self._url):
            try:
                try:
                    self._sync(record)
                except (KeyError, optuna.exceptions.UpdateFinishedTrialError):
                    # somebody has deleted the study, or ended a trial, with Optuna's tools: it is read again
                    self._study = None
                    self._sync(record)
            except BaseException:
                self._study = None  # what stands there is read again before the next writing
                raise
        return WrittenStudy(
            storage=shown(self._url), study=self._opened.study_name, trials=len(self._mirrored)
        )

    def close(self) -> None:
        """Closes the connections to the storage; a later sync opens it anew."""
        self._close()
        self._storage = self._study = None
        self._close = lambda: None

    def _sync(self, record: StudyRecord) -> None:
        if self._storage is None:
            self._storage, self._close = open_storage(self._url)
        if self._space is None or self._space[0] != record.grown:
            self._space = (record.grown, space_of(record))
        space = self._space[1]
        self._distributions = distributions_of(space)
        rows = self._rows_of(record)
        if self._study is None:
            self._open(self._storage, record)
        if self._contradicts(rows):
            self._make_anew(self._storage, record)
        for row in rows:
            self._write(row)
        attributes = study_attributes(record, self._varied(rows, space))
        for name, value in (self._identity(record) | attributes).items():
            if self._told.get(name) != value:
                self._opened.set_user_attr(name, value)
                self._told[name] = value

    @property
    def _opened(self) -> Study:
        assert self._study is not None, "only an open mirror is written"
        return self._study

    def _rows_of(self, record: StudyRecord) -> list[Row]:
        """Rows of all candidates with a point; that of a trial that has not changed is the one of before."""
        rows = {}
        for trial in record.candidates:
            if not trial.outside_space:
                before = self._rows.get(trial.number)
                resumes = trial.result.outcome is Outcome.INTERRUPTED and not record.finished
                same = before is not None and before[0] is trial and before[1] == resumes
                row = before[2] if before is not None and same else row_of(trial, resumes=resumes)
                rows[trial.number] = trial, resumes, row
        self._rows = rows
        return [row for _, _, row in rows.values()]

    def _varied(self, rows: Sequence[Row], space: Space) -> list[Axis]:
        """The space's axes less those that change nothing on this log, which points do not have."""
        names = {name for row in rows for name in row.params}
        return [axis for axis in space.axes if axis.name in names]

    def _open(self, storage: BaseStorage, record: StudyRecord) -> None:
        """Finds the study in the storage, or makes it, and reads what stands there."""
        import optuna

        name = self._name or record.name
        if name not in optuna.get_all_study_names(storage):
            self._create(storage, record)
            return
        study = optuna.load_study(study_name=name, storage=storage)
        self._told = study.user_attrs
        if self._told.get(IDENTITY, {}).get("created_at") != record.created_at or record.created_at is None:
            raise UserError(
                f"{shown(self._url)} has a study named {name!r} that is none of {record.directory}; it stays as "
                "it is. Give this one another name (`--name` of `dhen-search optuna`), or another storage."
            )
        self._study, self._mirrored, self._standing = study, {}, {}
        for trial in study.get_trials(deepcopy=False):
            if DIGEST in trial.system_attrs:
                self._standing.update(trial.distributions)
                self._mirrored[trial.user_attrs[NUMBER]] = _Mirrored(
                    id=trial._trial_id,
                    finished=trial.state.is_finished(),
                    digest=trial.system_attrs[DIGEST],
                    curve=set(trial.intermediate_values),
                    attributes=trial.user_attrs,
                )

    def _create(self, storage: BaseStorage, record: StudyRecord) -> None:
        import optuna

        self._study = optuna.create_study(
            study_name=self._name or record.name, storage=storage, directions=["minimize"] * len(OBJECTIVES)
        )
        with warnings.catch_warnings():  # names of objectives are an experiment of Optuna's since version 3.2
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(list(OBJECTIVES))
        # first of all, so that a mirror whose making was cut short is known to be one
        self._told = self._identity(record)
        self._study.set_user_attr(IDENTITY, self._told[IDENTITY])
        self._mirrored, self._standing = {}, {}

    def _make_anew(self, storage: BaseStorage, record: StudyRecord) -> None:
        import optuna

        optuna.delete_study(study_name=self._opened.study_name, storage=storage)
        self._create(storage, record)

    def _contradicts(self, rows: Sequence[Row]) -> bool:
        """Whether anything stands there that the record does not say, and that Optuna would not take back."""
        from optuna.distributions import check_distribution_compatibility

        by_number = {row.number: row for row in rows}
        for number, standing in self._mirrored.items():
            row = by_number.get(number)
            if row is None or (standing.finished and standing.digest != row.digest):
                return True
            if not standing.curve <= row.curve.keys():
                return True
        try:
            for name, standing_range in self._standing.items():
                check_distribution_compatibility(standing_range, self._distributions[name])
        except (KeyError, ValueError):
            return True
        return False

    def _write(self, row: Row) -> None:
        """Adds a trial, or moves one on that runs."""
        standing = self._mirrored.get(row.number)
        if standing is None:
            self._add(row)
        elif not standing.finished and standing.digest != row.digest:
            self._move_on(standing, row)

    def _add(self, row: Row) -> None:
        storage, study = self._storage, self._opened
        assert storage is not None
        try:
            frozen = row.frozen(self._distributions)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"trial {row.number} is no point of the space as its file is now ({error}): put the space back as "
                "it was when the study began."
            ) from None
        trial_id = storage.create_new_trial(study._study_id, template_trial=frozen)
        self._standing = self._distributions
        self._mirrored[row.number] = _Mirrored(
            id=trial_id,
            finished=row.finished,
            digest=row.digest,
            curve=set(row.curve),
            attributes=row.attributes,
        )

    def _move_on(self, standing: _Mirrored, row: Row) -> None:
        """Tells what is new of a trial that ran, and its end at last."""
        storage = self._storage
        assert storage is not None
        for examples in sorted(row.curve.keys() - standing.curve):
            storage.set_trial_intermediate_value(standing.id, examples, row.curve[examples])
        for name, value in row.attributes.items():
            if standing.attributes.get(name) != value:
                storage.set_trial_user_attr(standing.id, name, value)
        for name, value in row.system_attributes.items():
            storage.set_trial_system_attr(standing.id, name, value)
        if row.finished:
            storage.set_trial_state_values(standing.id, row.optuna_state(), row.values)
        standing.finished, standing.digest = row.finished, row.digest
        standing.curve, standing.attributes = set(row.curve), row.attributes

    def _identity(self, record: StudyRecord) -> dict[str, Any]:
        return {IDENTITY: {"created_at": record.created_at, "directory": record.directory}}


def study_attributes(record: StudyRecord, axes: Sequence[Axis]) -> dict[str, Any]:
    """Returns what Optuna's study says beside its trials: what is no point of the space, and what was chosen.

    Numbers of trials are the study's own, which each trial of Optuna has as its attribute `trial`.
    """
    outside = [trial for trial in record.candidates if trial.outside_space]
    distilled = [trial for trial in record.trials if trial.kind is TrialKind.DISTILLED]
    baseline = [trial for trial in record.trials if trial.number == record.baseline]
    return {
        "log": record.log.name,
        "space": record.space,
        "values": {
            axis.name: list(map(label, axis.ascending)) or list(axis.labels)
            for axis in axes
            if isinstance(axis, Choice)
        },
        "constraints": list(CONSTRAINT_NAMES),
        "baseline": _in_short(baseline[0]) if baseline else None,
        "averages": list(map(_in_short, record.averages)),
        "learnt_from_an_average": list(map(_in_short, distilled)),
        "on_all_rows": list(map(_in_short, record.promoted)),
        "outside_the_space": list(map(_in_short, outside)),
        "front": list(record.front),
        "best": record.best,
        "knee": record.knee,
        "confirmed": [comparison.to_dict() for comparison in record.comparisons],
    }


def _in_short(trial: TrialRecord) -> dict[str, Any]:
    """A trial that is no point of the space: its number, what it is, its two objectives."""
    quality = trial.result.validation
    return {
        "trial": trial.number,
        "architecture": trial_name(trial),
        "outcome": trial.result.outcome.value,
        "NE": quality.ne if quality is not None else None,
        "FLOPs": trial.job.flops,
    }
