"""A study's candidates against what serving may take: judged before they train, so that none trains in vain.

Size and FLOPs are known from the model. The forward time is measured, in a fresh process and once a network: equal
networks, also of a resumed study, have the same time, or its noise would judge them differently. What is over
another limit already, or fits in no memory, is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from dhen.errors import UserError
from dhen.values import fingerprint
from search.config import StudyConfig
from search.execution.trainer import Trainer
from trials.cluster.machine import device
from trials.job import Job
from trials.record import Outcome, TrialKind, TrialRecord
from trials.serving_limits import ServingConfig


class Serving:
    """The judge of one study's trials."""

    def __init__(self, config: ServingConfig, trainer: Trainer, trials: Iterable[TrialRecord]) -> None:
        """`trials`: of earlier sessions, whose times hold."""
        self._config, self._trainer = config, trainer
        self._ms = {fingerprint(t.model): t.serving_ms for t in trials if t.serving_ms is not None}

    def judged(self, record: TrialRecord, job: Job) -> TrialRecord:
        """A trial that is about to train; over a limit it has ended as infeasible, the baseline never.

        A candidate whose forward time cannot be measured has failed.
        """
        if not self._config.limited:
            return record
        began = time.monotonic()
        try:
            record = self._measured(record, job)
        except UserError as error:
            if record.kind is TrialKind.BASELINE:
                return record
            return record.replace(**({"outcome": Outcome.FAILED, "error": str(error)} | _ended(began)))
        return self._verdict(record, began)

    def judged_by_size(self, record: TrialRecord) -> TrialRecord:
        """One that another study has trained, by what is known of it without measuring."""
        excess = self._config.excess(**_taken(record))
        if excess is None:
            return record
        over = {"outcome": Outcome.INFEASIBLE} if excess > 0 else {}
        return record.replace(**({"serving_excess": excess} | over))

    def _measured(self, record: TrialRecord, job: Job) -> TrialRecord:
        """With the forward time, where it decides or is the baseline's."""
        decided = record.outcome is Outcome.INFEASIBLE or self._excess(record) > 0
        if self._config.max_ms is None or (decided and record.kind is not TrialKind.BASELINE):
            return record
        network = fingerprint(record.model)
        if network not in self._ms:
            self._ms[network] = self._trainer.forward_ms(job, self._config)
        return record.replace(serving_ms=self._ms[network])

    def _verdict(self, record: TrialRecord, began: float) -> TrialRecord:
        record = record.replace(serving_excess=self._excess(record))
        demands = self._config.demands(**_taken(record))
        over = "; ".join(demand.words for demand in demands if demand.excess > 0)
        if not over or record.kind is TrialKind.BASELINE:
            return record
        error = f"{record.error}; {over}" if record.error else over
        return record.replace(**({"outcome": Outcome.INFEASIBLE, "error": error} | _ended(began)))

    def _excess(self, record: TrialRecord) -> float:
        """Over the worst limit of those that are judged so far; 0 where none is."""
        return self._config.excess(**_taken(record)) or 0.0


def _taken(record: TrialRecord) -> dict[str, Any]:
    """What serving has limits on, of a trial, as far as it is known."""
    assert record.flops is not None
    assert record.weights_bytes is not None
    return {"flops": record.flops, "weights_bytes": record.weights_bytes, "ms": record.serving_ms}


def _ended(began: float) -> dict[str, float]:
    return {"seconds": time.monotonic() - began}


def side_by_side(config: StudyConfig) -> int | None:
    """Candidates side by side as the study says, or one where only the wall clock tells a forward time.

    Raises:
        UserError: where the study says several all the same.
    """
    disturbed = config.serving.threads > 1 or device().type != "cpu"
    if config.serving.max_ms is None or not disturbed:
        return config.parallel
    if config.parallel is not None and config.parallel > 1:
        raise UserError(
            f"parallel={config.parallel} and serving.max_ms: a forward time with several threads, or on an "
            "accelerator, is measured while nothing else trains; give parallel=1, or serving.threads=1 on a CPU."
        )
    return 1
