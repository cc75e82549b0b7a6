"""A study's candidates against what serving and their tables may take: judged before they train, so that none
trains in vain.

Sizes and FLOPs are known from the model. The forward time is measured, in a fresh process and once per
network: equal networks, also of a resumed study, have the same time, or its noise would judge them
differently. What is over another limit already, or fits in no memory, is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from dhen.errors import UserError
from dhen.fingerprint import fingerprint
from trials.job import Job
from trials.record import Outcome, TrialKind, TrialRecord
from trials.serving_limits import Limits, ServingConfig

MeasureMs = Callable[[Job, ServingConfig], float]
"""Milliseconds that a request to a job's model takes; raises UserError where it cannot be measured."""


class ServingGate:
    """The judge of one study's trials."""

    def __init__(self, limits: Limits, measure_ms: MeasureMs, trials: Iterable[TrialRecord]) -> None:
        """`trials`: of earlier sessions, whose measured times hold."""
        self._limits, self._measure_ms = limits, measure_ms
        self._ms = {
            fingerprint(trial.job.model): trial.plan.serving_ms
            for trial in trials
            if trial.plan.serving_ms is not None
        }

    def judge(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that is about to train; over a limit it has ended as infeasible, the baseline never.

        A candidate whose forward time cannot be measured has failed.
        """
        began = time.monotonic()
        try:
            record = self._measured(record, job)
        except UserError as error:
            if record.kind is TrialKind.BASELINE:
                return record
            return _ended(record, Outcome.FAILED, str(error), began)
        return self._verdict(record, began)

    def judge_by_size(self, record: TrialRecord) -> TrialRecord:
        """A trial that another study has trained, by what is known of it without measuring."""
        excess = self._limits.excess(**_taken(record))
        if excess is None:
            return record
        record = record.with_plan(serving_excess=excess)
        if excess <= 0:
            return record
        return record.with_result(outcome=Outcome.INFEASIBLE, error=self._over(record))

    def _measured(self, record: TrialRecord, job: Job) -> TrialRecord:
        """The trial with its forward time, where that decides or is the baseline's."""
        decided = record.result.outcome is Outcome.INFEASIBLE or self._excess(record) > 0
        if self._limits.serving.max_ms is None or (decided and record.kind is not TrialKind.BASELINE):
            return record
        network = fingerprint(record.job.model)
        if network not in self._ms:
            self._ms[network] = self._measure_ms(job, self._limits.serving)
        return record.with_plan(serving_ms=self._ms[network])

    def _over(self, record: TrialRecord) -> str:
        """Returns the limits that a trial is over, in words; nothing where it keeps all of them."""
        demands = self._limits.demands(**_taken(record))
        return "; ".join(demand.words for demand in demands if demand.excess > 0)

    def _verdict(self, record: TrialRecord, began: float) -> TrialRecord:
        record = record.with_plan(serving_excess=self._excess(record))
        over = self._over(record)
        if not over or record.kind is TrialKind.BASELINE:
            return record
        error = f"{record.result.error}; {over}" if record.result.error else over
        return _ended(record, Outcome.INFEASIBLE, error, began)

    def _excess(self, record: TrialRecord) -> float:
        """Excess over the worst limit of those that are judged so far; 0 where none is."""
        return self._limits.excess(**_taken(record)) or 0.0


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


def _ended(record: TrialRecord, outcome: Outcome, error: str, began: float) -> TrialRecord:
    return record.with_result(outcome=outcome, error=error, seconds=time.monotonic() - began)
