"""Whether winners are better than the baseline: retrained from fresh seeds, compared on the test split.

Of an average every member is retrained from each seed, and the mean of what they predict is compared.

The seeds are other than the study's, because the training that won was chosen for its luck too. Candidate and
baseline with the same seed see the same order of examples; where batches or passes differ, so does what they
make of it. The interval is of the difference between them, over seeds and blocks of examples together
(`search.winners.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dhen.errors import UserError
from search.export import trained_job
from search.winners.bootstrap import CONFIDENCE, Estimate, holm, paired_bootstrap
from search.winners.losses import Blocks, block_sums, blocks_of
from search.winners.retraining import SPLIT, Retrainings, Wanted
from trials.data.cache import PreparedLog
from trials.data.weights import Floats, example_weights
from trials.ledger import Ledger
from trials.metrics import entropy
from trials.record import Better, Comparison, Retraining, StudyRecord, TrialRecord

LEAST_SEEDS, SEEDS = 2, 5
"""What an interval needs, and how many there are by default."""
BySeed = dict[int, tuple[Retraining, ...]]
"""A trial's retrainings by seed: one each of a network, of an average as many as it has members."""


def fresh_seeds(study_seed: int, count: int) -> range:
    """Seeds of retrainings.

    Raises:
        UserError: for fewer than an interval needs.
    """
    if count < LEAST_SEEDS:
        raise UserError(
            f"--seeds {count}: an interval needs {LEAST_SEEDS} seeds at least; {SEEDS} are usual, and "
            "more make it narrower."
        )
    return range(study_seed + 1, study_seed + 1 + count)


def confirm(
    study: StudyRecord,
    log: PreparedLog,
    ledger: Ledger,
    retrainings: Retrainings,
    *,
    seeds: int,
    block_by: str | None = None,
) -> tuple[tuple[Comparison, ...], list[str]]:
    """The front's candidates against the baseline, by FLOPs, now in the ledger; and what failed.

    Args:
        study: whose selection is frozen.
        log: the study's.
        ledger: the study's, settled.
        retrainings: the study's.
        seeds: how many.
        block_by: a categorical column whose rows go together; None for rows that lie together in time.

    Raises:
        UserError: for too few seeds, a column that is none, where the baseline was not trained or nothing won,
            or where fewer than two seeds of any winner completed.
    """
    if study.baseline is None or not study.front:
        raise UserError("no candidate and baseline have completed yet, so there is nothing to compare.")
    each_seed = fresh_seeds(study.seed, seeds)
    blocks = blocks_of(log, log.split(SPLIT), block_by)
    compared = [study.networks(study.trial(number)) for number in (study.baseline, *study.front)]
    networks = {each.number: each for networks in compared for each in networks}.values()
    wanted = [Wanted(trial, trained_job(trial, log, seed)) for seed in each_seed for trial in networks]
    done = retrainings.run(wanted, score=True)
    reference, *own = (_by_seed(networks, log, each_seed, done) for networks in compared)
    pairs = [_Pair(number, by_seed, reference) for number, by_seed in zip(study.front, own, strict=True)]
    pairs = [pair for pair in pairs if len(pair.seeds) >= LEAST_SEEDS]
    failed = retrainings.failures(wanted)
    if not pairs:
        raise UserError(
            f"fewer than two seeds of every winner or of the baseline completed: {'; '.join(failed)}."
        )
    found = _compared(pairs, _Losses(log, blocks, retrainings))
    ledger.replace_comparisons(found)
    return found, failed


def _by_seed(
    networks: Sequence[TrialRecord],
    log: PreparedLog,
    seeds: Iterable[int],
    done: Mapping[str, Retraining],
) -> BySeed:
    """Retrainings of a trial's networks, from seeds with which all of them have a result."""
    names = {seed: [trained_job(each, log, seed).fingerprint for each in networks] for seed in seeds}
    scored = {name: each for name, each in done.items() if each.test is not None}
    return {
        seed: tuple(scored[name] for name in its)
        for seed, its in names.items()
        if all(name in scored for name in its)
    }


@dataclass(frozen=True)
class _Pair:
    """A winner and the baseline, by seed."""

    trial: int
    own: BySeed
    reference: BySeed

    @property
    def seeds(self) -> tuple[int, ...]:
        """From which both were trained."""
        return tuple(sorted(set(self.own) & set(self.reference)))


class _Losses:
    """Sums of losses by block; those of each model are worked out once."""

    def __init__(self, log: PreparedLog, blocks: Blocks, retrainings: Retrainings) -> None:
        self.blocks = blocks
        self._split, self._rate = log.split(SPLIT), log.schema.negative_sampling_rate
        self._retrainings = retrainings
        self._known: dict[tuple[int, ...], Floats] = {}

    def __call__(self, records: BySeed, seeds: Iterable[int]) -> Floats:
        """By seed and block."""
        return np.stack([self._sums(records[seed]) for seed in seeds])

    def ne(self, records: BySeed, seeds: Iterable[int]) -> float:
        """Mean over seeds."""
        weights = example_weights(self._split, self._rate)
        rows = float(self._split.rows if weights is None else weights.sum())
        base_rate = float(np.average(self._split.labels, weights=weights))
        return float(self(records, seeds).sum(axis=1).mean()) / rows / entropy(base_rate)

    def _sums(self, records: tuple[Retraining, ...]) -> Floats:
        key = tuple(each.number for each in records)
        if key not in self._known:
            logits = [self._retrainings.logits(each) for each in records]
            self._known[key] = block_sums(logits, self._split, self._rate, self.blocks)
        return self._known[key]


def _compared(pairs: Sequence[_Pair], losses: _Losses) -> tuple[Comparison, ...]:
    estimates = [
        paired_bootstrap(losses(pair.own, pair.seeds), losses(pair.reference, pair.seeds)) for pair in pairs
    ]
    adjusted = holm([estimate.p for estimate in estimates])
    return tuple(
        _comparison(pair, estimate, p, len(pairs), losses)
        for pair, estimate, p in zip(pairs, estimates, adjusted, strict=True)
    )


def _comparison(
    pair: _Pair, estimate: Estimate, p_adjusted: float, winners: int, losses: _Losses
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
    )


def better(percent: float, p_adjusted: float) -> Better:
    """Than the reference, by the sign of a relative difference that is significant at 5 %."""
    if p_adjusted > 1.0 - CONFIDENCE:
        return Better.CANNOT_TELL
    return Better.YES if percent < 0.0 else Better.NO
