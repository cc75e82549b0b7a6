"""OptunaMirror: keeps an Optuna study equal to the record, for those who look at it with Optuna's tools.

Its trials are the candidates that are points of the space. What is no point of it (the baseline, averages,
networks that learnt from one, trainings on all rows, proposals outside the space) stands in attributes of the
study: as trials without parameters they would leave Optuna's charts no parameter that all trials have.

Optuna takes nothing back of a trial that has ended. So each sync adds what is new, moves on what runs, and
only if the record contradicts what stands there (a trial was trained again, a choice has more values) the
study is made anew. The ledger stays the truth: nothing is ever read from here
(docs/decisions/0033-optuna-mirror.md).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dashboards.names import known, trial_name
from dashboards.rows import shared_with
from dhen.errors import UserError
from search.execution.growth import space_of
from search.study.optuna_storage import WrittenStudy, distributions_of, in_words, open_storage, shown
from spaces.axes import Axis, ChoiceAxis, label
from spaces.space import Space
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial


# What Optuna is told of one candidate: a trial with state, values, curve, constraints and attributes.

QUALITY = ("ne", "auc", "calibration")
"""User attributes with a trial's quality on validation."""
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


def frozen_trial(
    trial: TrialRecord, distributions: Mapping[str, BaseDistribution], *, resumes: bool = False
) -> FrozenTrial:
    """Returns a candidate that has a point of the space as Optuna takes it in whole, with its times.

    Args:
        trial: the candidate.
        distributions: distributions of the space's axes, by name.
        resumes: whether it was cut short and trains again when its study goes on, so that it has not ended.

    Raises:
        UserError: if the space has changed, so that the candidate is no point of it.
    """
    from optuna.trial import TrialState, create_trial

    result, quality = trial.result, trial.result.validation
    state = FINISHED_AS.get(result.outcome, "FAIL")
    values: tuple[float, float] | None = None
    constraints: list[float] | None = None
    if resumes or result.outcome is Outcome.RUNNING:
        state = "RUNNING"
    elif result.outcome is Outcome.COMPLETED:
        if quality is not None and known(quality.ne):
            values = quality.ne, trial.job.flops or 0.0
        else:
            state = "FAIL"
    curve = dict(zip(result.curve.examples, result.curve.ne, strict=True))
    attributes = attributes_of(trial)
    excesses = [trial.plan.memory_excess, trial.plan.serving_excess]
    if any(excess is not None for excess in excesses):
        constraints = [0.0 if excess is None else excess for excess in excesses]
    # times are not in the digest, as Optuna notes its own for a trial that it saw running; keys are sorted, as a
    # database may give those of a point back in another order
    said = json.dumps((state, values, trial.point, curve, attributes, constraints), sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    try:
        frozen: FrozenTrial = create_trial(
            state=TrialState[state],
            values=values,
            params=dict(trial.point),
            distributions={name: distributions[name] for name in trial.point},
            user_attrs=attributes,
            system_attrs={DIGEST: digest} | ({} if constraints is None else {CONSTRAINTS: constraints}),
            intermediate_values=curve,
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            f"trial {trial.number} is no point of the space as its file is now ({error}): put the space back as "
            "it was when the study began."
        ) from None
    started = local_time(trial.origin.started_at)
    if started is not None:
        frozen.datetime_start = started
        frozen.datetime_complete = started + timedelta(seconds=result.seconds or 0.0)
    if not frozen.state.is_finished():
        frozen.datetime_complete = None
    return frozen


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
        **{name: value for name in QUALITY if quality and known(value := getattr(quality, name))},
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


OBJECTIVES = ("NE", "FLOPs")
IDENTITY = "dhen_search"
"""User attribute of the study that says whose mirror it is."""


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
        self._space: Space | None = None
        """The space as it was read last."""
        self._grown: tuple[GrownAxis, ...] = ()
        """The steps by which it had grown."""
        self._mirrored: dict[int, tuple[int, FrozenTrial]] = {}
        """Trials as they stand in the storage, with their identities there, by their number in the study."""
        self._rows: dict[int, tuple[TrialRecord, bool, FrozenTrial]] = {}
        """Candidates as Optuna is to have them, with what they follow from."""
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
        import optuna

        if self._storage is None:
            self._storage, self._close = open_storage(self._url)
        if self._space is None or self._grown != record.grown:
            self._space, self._grown = space_of(record), record.grown
            self._distributions = distributions_of(self._space)
            self._rows.clear()
        rows: dict[int, tuple[TrialRecord, bool, FrozenTrial]] = {}
        for trial in record.candidates:
            if not trial.outside_space:
                resumes = trial.result.outcome is Outcome.INTERRUPTED and not record.finished
                row = self._rows.get(trial.number)
                if row is None or row[0] is not trial or row[1] != resumes:
                    row = trial, resumes, frozen_trial(trial, self._distributions, resumes=resumes)
                rows[trial.number] = row
        self._rows = rows
        if self._study is None:
            self._open(self._storage, record)
        wanted = {number: frozen for number, (_, _, frozen) in rows.items()}
        if self._contradicts(wanted):
            optuna.delete_study(study_name=self._opened.study_name, storage=self._storage)
            self._create(self._storage, record)
        for number, frozen in wanted.items():
            self._write(self._storage, number, frozen)
        # axes that change nothing on this log are in no point
        names = {name for frozen in wanted.values() for name in frozen.params}
        attributes = study_attributes(record, [axis for axis in self._space.axes if axis.name in names])
        for name, value in (_identity(record) | attributes).items():
            if self._told.get(name) != value:
                self._opened.set_user_attr(name, value)
                self._told[name] = value

    @property
    def _opened(self) -> Study:
        assert self._study is not None, "only an open mirror is written"
        return self._study

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
                self._mirrored[trial.user_attrs[NUMBER]] = trial._trial_id, trial

    def _create(self, storage: BaseStorage, record: StudyRecord) -> None:
        import optuna

        self._study = optuna.create_study(
            study_name=self._name or record.name, storage=storage, directions=["minimize"] * len(OBJECTIVES)
        )
        with warnings.catch_warnings():  # names of objectives are an experiment of Optuna's since version 3.2
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.set_metric_names(list(OBJECTIVES))
        # first of all, so that a mirror whose making was cut short is known to be one
        self._told = _identity(record)
        self._study.set_user_attr(IDENTITY, self._told[IDENTITY])
        self._mirrored, self._standing = {}, {}

    def _contradicts(self, rows: Mapping[int, FrozenTrial]) -> bool:
        """Whether anything stands there that the record does not say, and that Optuna would not take back."""
        from optuna.distributions import check_distribution_compatibility

        for number, (_, standing) in self._mirrored.items():
            row = rows.get(number)
            if row is None or (standing.state.is_finished() and _differ(standing, row)):
                return True
            if not standing.intermediate_values.keys() <= row.intermediate_values.keys():
                return True
        try:
            for name, standing_range in self._standing.items():
                check_distribution_compatibility(standing_range, self._distributions[name])
        except (KeyError, ValueError):
            return True
        return False

    def _write(self, storage: BaseStorage, number: int, row: FrozenTrial) -> None:
        """Adds a trial, or updates a running one, up to its end."""
        if number not in self._mirrored:
            trial_id = storage.create_new_trial(self._opened._study_id, template_trial=row)
            self._mirrored[number], self._standing = (trial_id, row), self._distributions
            return
        trial_id, standing = self._mirrored[number]
        if standing.state.is_finished() or not _differ(standing, row):
            return
        for examples in sorted(row.intermediate_values.keys() - standing.intermediate_values.keys()):
            storage.set_trial_intermediate_value(trial_id, examples, row.intermediate_values[examples])
        for name, value in row.user_attrs.items():
            if standing.user_attrs.get(name) != value:
                storage.set_trial_user_attr(trial_id, name, value)
        for name, value in row.system_attrs.items():
            storage.set_trial_system_attr(trial_id, name, value)
        if row.state.is_finished():
            storage.set_trial_state_values(trial_id, row.state, row.values)
        self._mirrored[number] = trial_id, row


def _differ(standing: FrozenTrial, row: FrozenTrial) -> bool:
    return bool(standing.system_attrs[DIGEST] != row.system_attrs[DIGEST])


def _identity(record: StudyRecord) -> dict[str, Any]:
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
            if isinstance(axis, ChoiceAxis)
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
