"""Whether a trial may train, and how: planned for the study's cluster, then judged by the limits on
serving and on tables.

A trial that runs out of memory although it was admitted shows by how much plans are too low; plans that follow
leave as much memory free.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from search.planning.attempts import Execution, learnt_margins
from search.planning.plan_trial import plan_of, planned
from search.planning.serving_gate import MeasureMs, ServingGate
from trials.cluster.cluster import Cluster
from trials.embeddings.requirements import UnfitShardError
from trials.job import Job
from trials.planner.options import PlanOptions
from trials.planner.plan import Plan
from trials.record import Outcome, TrialKind, TrialRecord
from trials.serving_limits import Limits

AdmittedTrial = tuple[TrialRecord, Job | None]
"""A trial whose turn it is, and its job; no job where its point gives no model, or one not to be trained."""

LOG = logging.getLogger(__name__)


class Admission:
    """Admits the trials of one study."""

    def __init__(
        self,
        *,
        clusters: Sequence[Cluster],
        execution: Execution,
        limits: Limits,
        measure_ms: MeasureMs,
        trials: Collection[TrialRecord],
    ) -> None:
        """The admission of one study's trials.

        Args:
            clusters: the cluster that trials are planned for, in each shape that they may have, the least first.
            execution: how attempts are executed, and which one follows another.
            limits: limits on the models that are admitted.
            measure_ms: measures a forward time.
            trials: trials of earlier sessions.
        """
        self._clusters, self._execution = clusters, execution
        self._gate = ServingGate(limits, measure_ms, trials) if limits.limited else None
        self._learnt = learnt_margins(trials)

    def plan(self, job: Job) -> Plan:
        """A job's plan, which leaves as much memory free as earlier plans were too low by.

        Raises:
            UserError: for a batch smaller than the number of ranks.
        """
        return plan_of(job, self._clusters, self._options)

    def admit(self, record: TrialRecord, job: Job, earlier: TrialRecord | None = None) -> AdmittedTrial:
        """The trial with its plan; a trial that fits nowhere or is over a limit has ended.

        `earlier` is the same trial as an earlier session left it: if an attempt of it was cut short or ran out of
        memory, the trial goes on with its next attempt.
        """
        if earlier is not None and earlier.attempts:
            resumed = self._execution.next_attempt(earlier, job)
            if resumed is not None:
                return resumed, job
        record = self._with_plan(record, job)
        if self._gate is not None:
            record = self._gate.judge(record, job)
        LOG.info(
            "trial %d: %s, planned as %s on %s ranks",
            *(record.number, record.result.outcome, record.plan.technique, record.plan.ranks),
        )
        return record, job if record.result.outcome is Outcome.RUNNING else None

    def admit_by_size(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that another study has trained, with a plan for this study; its forward time is not measured."""
        record = self._with_plan(record, job)
        return record if self._gate is None else self._gate.judge_by_size(record)

    def next_attempt(self, record: TrialRecord, job: Job) -> TrialRecord | None:
        """A trial as it begins its next attempt; None where none is left (see `Execution.next_attempt`)."""
        self.learn(record)
        return self._execution.next_attempt(record, job)

    def step_seconds(self, record: TrialRecord) -> float | None:
        """Seconds of a step of a trial's plan by what is known now (see `Execution.step_seconds`)."""
        return self._execution.step_seconds(record)

    def learn(self, record: TrialRecord) -> None:
        """Has plans that follow leave as much memory free as this trial's were too low by."""
        for held_as, missing in learnt_margins([record]).items():
            self._learnt[held_as] = max(missing, self._learnt.get(held_as, 0))

    def ended(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that no attempt follows, as it ends (see `Execution.ended`)."""
        return self._execution.ended(record, job)

    def _with_plan(self, record: TrialRecord, job: Job) -> TrialRecord:
        record = self._execution.corrected(planned(record, job, self._clusters, self._options))
        try:
            if record.kind is TrialKind.CANDIDATE and record.result.outcome is Outcome.RUNNING:
                self._execution.check(record, job)
        except UnfitShardError as error:  # of this candidate alone: the study has others
            return record.with_result(outcome=Outcome.INFEASIBLE, error=str(error), seconds=0.0)
        return record

    @property
    def _options(self) -> PlanOptions:
        """What is asked of plans, with what has been learnt of them so far."""
        return self._execution.options.replace(learnt=dict(self._learnt))
