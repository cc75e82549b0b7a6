"""Whether winners are better than the baseline: retrained from fresh seeds, compared on the test split.

Candidate and baseline with the same seed see the same order of examples; where batches or passes differ, so does
what they make of it. The interval is of the difference between them, over seeds and blocks of examples together
(`search.analysis.statistics.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dhen.errors import UserError
from search.analysis.choice.winners import REASONS, winners_of
from search.analysis.losses import blocks_of
from search.analysis.scored import (
    LEAST_SEEDS,
    BlockLosses,
    BySeed,
    by_seed,
    fresh_seeds,
    too_few,
    wanted_from,
)
from search.analysis.statistics.bootstrap import CONFIDENCE, BootstrapDifference, holm, paired_bootstrap
from search.execution.retraining import SPLIT, HasTimeFor, RetrainingRequest, Retrainings
from trials.analyses import Better
from trials.choice import Winner
from trials.data.cache import PreparedLog
from trials.storage.ledger import Ledger
from trials.study_record import Comparison, StudyRecord


def confirm(
    study: StudyRecord,
    log: PreparedLog,
    ledger: Ledger,
    retrainings: Retrainings,
    *,
    seeds: int,
    winners: Sequence[int] | None = None,
    block_by: str | None = None,
    has_time_for: HasTimeFor | None = None,
) -> tuple[tuple[Comparison, ...], list[str]]:
    """The comparisons of the winners with the baseline, by FLOPs, also kept in the ledger; and what failed.

    The winners are those that the study has chosen (`trials.choice`); a study that was finished before choices
    were noted has them chosen now, by the same rule.

    Args:
        study: the study, whose selection is frozen.
        log: the study's log.
        ledger: the study's ledger, settled.
        retrainings: the study's retrainings.
        seeds: number of seeds.
        winners: numbers of the winners to compare; None for all of them.
        block_by: the column of `search.analysis.losses.blocks_of`.
        has_time_for: as in `Retrainings.run`; the seeds come one after another, and those count that there was
            time for.

    Raises:
        UserError: for too few seeds, a column that is not categorical, where the baseline was not trained or
            nothing won, or where fewer than two seeds of any winner completed.
    """
    if study.baseline is None or not study.front:
        raise UserError("no candidate and baseline have completed yet, so there is nothing to compare.")
    seed_range = fresh_seeds(study.seed, seeds)
    blocks = blocks_of(log, log.split(SPLIT), block_by)
    numbers = _winners(study, winners)
    compared = [study.networks(study.trial(number)) for number in (study.baseline, *numbers)]
    wanted = confirming(study, log, seeds=seeds, winners=numbers)
    done = retrainings.run(wanted, score=SPLIT, has_time_for=has_time_for)
    reference, *own = (by_seed(networks, study, log, seed_range, done) for networks in compared)
    pairs = [_Pair(number, retrained, reference) for number, retrained in zip(numbers, own, strict=True)]
    pairs = [pair for pair in pairs if len(pair.seeds) >= LEAST_SEEDS]
    failed = retrainings.failures(wanted)
    if not pairs:
        raise too_few("of every winner, or of the baseline,", seeds, failed)
    comparisons = _compared(pairs, BlockLosses(log, blocks, retrainings))
    ledger.replace_comparisons(comparisons)
    return comparisons, failed


def confirming(
    study: StudyRecord, log: PreparedLog, *, seeds: int, winners: Sequence[int] | None = None
) -> list[RetrainingRequest]:
    """The retrainings that compare the winners (all of them, or these) with the baseline, seed by seed, each
    network once per seed: the baseline's first, then the best's, so that whatever ends them, it is compared."""
    assert study.baseline is not None
    ordered = [number for number in most_important_first(study) if winners is None or number in winners]
    compared = [study.networks(study.trial(number)) for number in (study.baseline, *ordered)]
    networks = {network.job.fingerprint: network for networks in compared for network in networks}
    return wanted_from(networks.values(), study, log, fresh_seeds(study.seed, seeds))


def most_important_first(study: StudyRecord) -> list[int]:
    """Numbers of all winners of a study, its best first, then by what they were chosen as."""
    ranked = sorted(_chosen(study), key=lambda winner: min(map(REASONS.index, winner.reasons)))
    return [winner.trial for winner in ranked]


def _winners(study: StudyRecord, among: Sequence[int] | None) -> list[int]:
    """Numbers of the trials to confirm, by FLOPs."""
    return [winner.trial for winner in _chosen(study) if among is None or winner.trial in among]


def _chosen(study: StudyRecord) -> tuple[Winner, ...]:
    return study.choice.winners if study.choice else winners_of(study, study.best)


@dataclass(frozen=True)
class _Pair:
    """Retrainings of a winner and of the baseline, by seed."""

    trial: int
    own: BySeed
    reference: BySeed

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds from which both were trained."""
        return tuple(sorted(set(self.own) & set(self.reference)))


def _compared(pairs: Sequence[_Pair], losses: BlockLosses) -> tuple[Comparison, ...]:
    estimates = [
        paired_bootstrap(losses(pair.own, pair.seeds), losses(pair.reference, pair.seeds)) for pair in pairs
    ]
    adjusted = holm([estimate.p for estimate in estimates])
    return tuple(
        _comparison(pair, estimate, p, len(pairs), losses)
        for pair, estimate, p in zip(pairs, estimates, adjusted, strict=True)
    )


def _comparison(
    pair: _Pair, estimate: BootstrapDifference, p_adjusted: float, winners: int, losses: BlockLosses
) -> Comparison:
    low, high = estimate.interval()
    blocks = losses.blocks
    return Comparison(
        trial=pair.trial,
        seeds=pair.seeds,
        blocks=blocks.count,
        blocked_by=blocks.by,
        ne=losses.ne(pair.own, pair.seeds),
        baseline_ne=losses.ne(pair.reference, pair.seeds),
        difference_percent=estimate.percent,
        low_percent=low,
        high_percent=high,
        p=estimate.p,
        p_adjusted=p_adjusted,
        winners=winners,
        detectable_percent=estimate.detectable(winners),
        better=better(estimate.percent, p_adjusted),
        refit=all(record.job.refit is not None for records in pair.own.values() for record in records),
    )


def better(percent: float, p_adjusted: float) -> Better:
    """Whether a model is better than the reference, by a relative difference that is significant at 5 %."""
    if p_adjusted > 1.0 - CONFIDENCE:
        return Better.CANNOT_TELL
    return Better.YES if percent < 0.0 else Better.NO
