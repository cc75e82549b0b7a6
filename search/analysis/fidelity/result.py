"""An audit as trained: each fraction's cost and how well it ranks, and the cheapest that is good enough.

`FidelityResult` is the shape of `--json` and of the file beside the table. Every row ranks against the same
reference, trainings on the whole log from a second seed: so no row profits from initial weights that it has in
common with it, and the row of the whole log is the most that a fraction can be expected to reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dhen.errors import UserError
from dhen.values import Value
from search.analysis.fidelity.config import FidelityConfig
from search.analysis.reproduce.config import CONFIDENCE
from search.analysis.statistics.rank_correlation import (
    RankCorrelation,
    regret_percent,
    tau_interval,
    tau_of_best,
)
from trials.data.cache import PreparedLog
from trials.record import TrialRecord

BEST_SHARE = 1 / 3
"""Share of the candidates, the best by the reference, for which tau is given by itself."""


class CandidateResult(Value):
    """NE and FLOPs of one candidate."""

    name: str
    flops: float
    """FLOPs of the forward pass per example."""
    ne: tuple[float | None, ...]
    """NE on validation, by row of the table; None where the training diverged."""
    reference_ne: float | None
    """NE on the whole log, from the second seed."""


class FractionResult(Value):
    """Cost and ranking of one part of the log, or of all of it."""

    fraction: float
    rows: int
    """Number of rows of a pass."""
    flops_share: float
    """FLOPs per example times examples trained, over all candidates, relative to the whole log."""
    seconds: float
    """Seconds of training and evaluation of all candidates, as measured."""
    seconds_share: float | None
    tau: RankCorrelation | None
    """Correlation with the reference's ranking; None where all NE are equal."""
    tau_of_best_third: float | None
    """Tau among the reference's best third; None where that has fewer than three candidates."""
    regret_percent: float | None
    """Excess of the reference NE of the best candidate here over the lowest; None where it diverged."""


class FidelityResult(Value):
    """Results of an audit: cost and ranking of each fraction of a log."""

    log: str
    """Fingerprint of the log."""
    space: str
    train_rows: int
    validation_rows: int
    seed: int
    reference_seed: int
    wanted_tau: float
    confidence: float
    fractions: tuple[FractionResult, ...]
    """Rows in ascending order; the last is the whole log, of which no fraction can be expected to rank better."""
    candidates: tuple[CandidateResult, ...]
    cheapest: float | None
    """The least fraction whose tau is at least the wanted one."""
    cheapest_surely: float | None
    """The least fraction of which the lower end of tau's interval is at least the wanted tau."""

    @property
    def whole(self) -> FractionResult:
        """The row of the whole log, which compares its two seeds."""
        return self.fractions[-1]


class Trained(NamedTuple):
    """Trainings of all candidates on one part of the log."""

    fraction: float
    records: Sequence[TrialRecord]


def result_of(
    config: FidelityConfig,
    log: PreparedLog,
    names: Sequence[str],
    trained: Sequence[Trained],
    reference: Sequence[TrialRecord],
) -> FidelityResult:
    """The audit from its finished trainings.

    Args:
        config: settings of the audit.
        log: the log that is audited.
        names: names of the candidates.
        trained: trainings by fraction, the whole log last.
        reference: trainings on the whole log from the second seed.

    Raises:
        UserError: where all candidates diverged on the whole log.
    """
    target = [_ne(record) for record in reference]
    if not any(map(math.isfinite, target)):
        raise UserError(f"every candidate diverged on the whole log: {reference[0].result.error}.")
    rows = tuple(_row(part, trained[-1], target, config, log) for part in trained)
    return FidelityResult(
        log=log.fingerprint,
        space=config.space,
        train_rows=log.manifest.rows["train"],
        validation_rows=log.manifest.rows["validation"],
        seed=config.seed,
        reference_seed=config.seed + 1,
        wanted_tau=config.tau,
        confidence=CONFIDENCE,
        fractions=rows,
        candidates=tuple(
            CandidateResult(
                name=name,
                flops=last.job.flops or 0.0,
                ne=tuple(_finite(_ne(part.records[index])) for part in trained),
                reference_ne=_finite(target[index]),
            )
            for index, (name, last) in enumerate(zip(names, reference, strict=True))
        ),
        cheapest=cheapest(rows, config.tau),
        cheapest_surely=cheapest(rows, config.tau, surely=True),
    )


def cheapest(rows: Sequence[FractionResult], wanted: float, *, surely: bool = False) -> float | None:
    """The least fraction below 1 whose tau, or its interval's lower end, is at least the wanted one."""
    parts = (row for row in rows if row.fraction < 1.0 and row.tau is not None)
    enough = (
        row.fraction for row in parts if row.tau and (row.tau.low if surely else row.tau.value) >= wanted
    )
    return min(enough, default=None)


def _row(
    part: Trained, whole: Trained, target: Sequence[float], config: FidelityConfig, log: PreparedLog
) -> FractionResult:
    ne = [_ne(record) for record in part.records]
    seconds, all_seconds = _seconds(part), _seconds(whole)
    training = config.training.replace(train_fraction=part.fraction)
    return FractionResult(
        fraction=part.fraction,
        rows=training.rows_used(log.manifest.rows["train"]),
        flops_share=_flops(part) / _flops(whole),
        seconds=seconds,
        seconds_share=seconds / all_seconds if all_seconds else None,
        tau=tau_interval(ne, target, CONFIDENCE, config.seed),
        tau_of_best_third=tau_of_best(ne, target, BEST_SHARE),
        regret_percent=regret_percent(ne, target),
    )


def _ne(record: TrialRecord) -> float:
    """NE at the best point of the curve, as a study compares; infinite where the training diverged."""
    ne = record.result.validation.ne if record.result.validation else math.inf
    return math.inf if math.isnan(ne) else ne


def _finite(ne: float) -> float | None:
    return ne if math.isfinite(ne) else None


def _flops(trained: Trained) -> float:
    """Forward FLOPs of all examples seen."""
    seen = ((record.job.flops or 0.0, record.result.curve) for record in trained.records)
    return sum(flops * curve[-1].examples for flops, curve in seen if curve)


def _seconds(trained: Trained) -> float:
    return sum(record.result.measured.whole_seconds for record in trained.records)
