"""Whether a trial may train, and how: planned for the study's cluster, then judged by the limits on
serving and on tables.

A trial that runs out of memory although it was admitted shows by how much plans are too low; plans that follow
leave as much memory free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from dhen.errors import UserError
from dhen.values import fingerprint
from search.execution.attempts import Execution, learnt_margins
from search.execution.plan_trial import plan_of, planned
from trials.cluster.cluster import Cluster
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan
from trials.records.job import Job
from trials.records.serving_limits import Limits, ServingConfig
from trials.records.trial_record import Outcome, TrialKind, TrialRecord
from trials.training.embeddings.requirements import UnfitShardError

MeasureMs = Callable[[Job, ServingConfig], float]
"""Milliseconds that a request to a job's model takes; raises UserError if it cannot be measured."""
AdmittedTrial = tuple[TrialRecord, Job | None]
"""A trial whose turn it is, and its job; no job if its point gives no model, or one not to be trained."""

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
        self.execution = execution
        self._clusters, self._limits, self._measure_ms = clusters, limits, measure_ms
        self._learnt = learnt_margins(trials)
        self._forward_ms = {
            fingerprint(trial.job.model): trial.plan.serving_ms
            for trial in trials
            if trial.plan.serving_ms is not None
        }
        """Milliseconds by network, of earlier sessions too: noise would else judge equal networks differently."""

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
            resumed = self.execution.next_attempt(earlier, job)
            if resumed is not None:
                return resumed, job
        record = self._with_plan(record, job)
        if self._limits.limited:
            record = self._judged(record, job)
        LOG.info(
            "trial %d: %s, planned as %s on %s ranks",
            *(record.number, record.result.outcome, record.plan.technique, record.plan.ranks),
        )
        return record, job if record.result.outcome is Outcome.RUNNING else None

    def admit_by_size(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that another study has trained, with a plan for this study; its forward time is not measured."""
        record = self._with_plan(record, job)
        excess = self._limits.excess(**_taken(record)) if self._limits.limited else None
        if excess is None:
            return record
        record = record.with_plan(serving_excess=excess)
        if excess <= 0:
            return record
        return record.with_result(outcome=Outcome.INFEASIBLE, error=self._over(record))

    def next_attempt(self, record: TrialRecord, job: Job) -> TrialRecord | None:
        """A trial as it begins its next attempt; None if none is left (see `Execution.next_attempt`)."""
        self.learn(record)
        return self.execution.next_attempt(record, job)

    def learn(self, record: TrialRecord) -> None:
        """Has plans that follow leave as much memory free as this trial's were too low by."""
        for held_as, missing in learnt_margins([record]).items():
            self._learnt[held_as] = max(missing, self._learnt.get(held_as, 0))

    def _judged(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that is about to train, held against the limits, so that none trains in vain.

        Over a limit it has ended as infeasible, the baseline never. A candidate whose forward time cannot be
        measured has failed. What is over another limit already, or fits in no memory, is not measured.
        """
        began, of_baseline = time.monotonic(), record.kind is TrialKind.BASELINE
        decided = record.result.outcome is Outcome.INFEASIBLE or self._excess(record) > 0
        if self._limits.serving.max_ms is not None and (of_baseline or not decided):
            network = fingerprint(record.job.model)
            try:
                if network not in self._forward_ms:
                    self._forward_ms[network] = self._measure_ms(job, self._limits.serving)
            except UserError as error:
                if of_baseline:
                    return record
                seconds = time.monotonic() - began
                return record.with_result(outcome=Outcome.FAILED, error=str(error), seconds=seconds)
            record = record.with_plan(serving_ms=self._forward_ms[network])
        record = record.with_plan(serving_excess=self._excess(record))
        over = self._over(record)
        if not over or of_baseline:
            return record
        error_words = f"{record.result.error}; {over}" if record.result.error else over
        seconds = time.monotonic() - began
        return record.with_result(outcome=Outcome.INFEASIBLE, error=error_words, seconds=seconds)

    def _excess(self, record: TrialRecord) -> float:
        """Excess over the worst limit of those that are judged so far; 0 if none is."""
        return self._limits.excess(**_taken(record)) or 0.0

    def _over(self, record: TrialRecord) -> str:
        """Returns the limits that a trial is over, in words; nothing if it keeps all of them."""
        demands = self._limits.demands(**_taken(record))
        return "; ".join(demand.words for demand in demands if demand.excess > 0)

    def _with_plan(self, record: TrialRecord, job: Job) -> TrialRecord:
        record = self.execution.corrected(planned(record, job, self._clusters, self._options))
        try:
            if record.kind is TrialKind.CANDIDATE and record.result.outcome is Outcome.RUNNING:
                self.execution.check(record, job)
        except UnfitShardError as error:  # of this candidate alone: the study has others
            return record.with_result(outcome=Outcome.INFEASIBLE, error=str(error), seconds=0.0)
        return record

    @property
    def _options(self) -> PlanOptions:
        """What is asked of plans, with what has been learnt of them so far."""
        return self.execution.options.replace(learnt=dict(self._learnt))


def _taken(record: TrialRecord) -> dict[str, Any]:
    """What may have limits, for a trial, as far as it is known."""
    job = record.job
    assert job.flops is not None
    assert job.weights_bytes is not None
    return {
        "flops": job.flops,
        "weights_bytes": job.weights_bytes,
        "table_bytes": job.table_bytes,
        "ms": record.plan.serving_ms,
    }
