"""What Optuna is told of one candidate: a trial with state, values, curve, constraints and attributes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dashboards.names import trial_name
from dashboards.rows import shared_with
from dashboards.units import known
from spaces.space import Point
from trials.record import Outcome, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

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
    """The excesses in the order of their names, 0 for one that is not known; None where none is."""
    excesses = [trial.plan.memory_excess, trial.plan.serving_excess]
    if all(excess is None for excess in excesses):
        return None
    return [0.0 if excess is None else excess for excess in excesses]
