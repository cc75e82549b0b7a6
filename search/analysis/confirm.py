"""Whether winners are better than the baseline: retrained from fresh seeds, compared on the test split.

Candidate and baseline with the same seed see the same order of examples; if batches or passes differ, so
does what they make of it. The interval is of the difference between them, over seeds and blocks of examples
together (`search.analysis.statistics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dhen.errors import UserError
from search.analysis.choice import REASONS, winners_of
from search.analysis.losses import Blocks, block_sums, blocks_of
from search.analysis.statistics import CONFIDENCE, holm, paired_bootstrap
from search.execution.retraining import SPLIT, HasTimeFor, RetrainingRequest, Retrainings
from search.execution.trainer import refit_job, trained_job
from trials.data.prepared_log import PreparedLog
from trials.records.findings import Winner, WinnerVerdict
from trials.records.job import Job
from trials.records.metrics import Floats, entropy, example_weights
from trials.records.study_record import Comparison, StudyRecord
from trials.records.trial_record import TrialRecord
from trials.store.ledger import Ledger

# Trials retrained from fresh seeds and scored on the test split: their results and their losses, by seed.
#
# The seeds are other than the study's, because the training that won was chosen for its luck too. For an average
# every member is retrained from each seed, and the mean of what they predict is what counts.

LEAST_SEEDS, SEEDS = 2, 5
"""Number of seeds that an interval needs, and number of seeds by default."""
BySeed = dict[int, tuple[TrialRecord, ...]]
"""A trial's retrainings by seed: one for a network, one per member for an average."""
JobOf = Callable[..., Job]
"""A function that makes the job of a network on a log, with its seed moved by `seed_shift`."""


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


def retrained_job(
    network: TrialRecord, study: StudyRecord, log: PreparedLog, seed: int, job_of: JobOf | None = None
) -> Job:
    """The job of training a network of a study from another seed; networks with different seeds keep them
    apart. Without `job_of` it is trained as the study's winners were: once more on validation too, if they
    were."""
    made = job_of or (refit_job if study.refits else trained_job)
    return made(network, log, seed_shift=seed - study.seed)


def wanted_from(
    networks: Iterable[TrialRecord],
    study: StudyRecord,
    log: PreparedLog,
    seeds: Iterable[int],
    job_of: JobOf | None = None,
) -> list[RetrainingRequest]:
    """The retrainings of a study's networks from each seed, seed by seed, as `retrained_job` makes them. For a
    network that is a retraining itself (a further seed that an average has for a member), it is the trial's
    network that is trained again."""
    pairs = [(study.trial(network.network_of), network) for network in networks]
    return [
        RetrainingRequest(trial, retrained_job(network, study, log, seed, job_of))
        for seed in seeds
        for trial, network in pairs
    ]


def by_seed(
    networks: Sequence[TrialRecord],
    study: StudyRecord,
    log: PreparedLog,
    seeds: Iterable[int],
    done: Mapping[str, TrialRecord],
    job_of: JobOf | None = None,
) -> BySeed:
    """Retrainings of a trial's networks, from seeds with which all of them have a result."""
    fingerprints = {
        seed: [retrained_job(network, study, log, seed, job_of).fingerprint for network in networks]
        for seed in seeds
    }
    scored = {fingerprint: record for fingerprint, record in done.items() if record.result.test is not None}
    return {
        seed: tuple(scored[fingerprint] for fingerprint in of_seed)
        for seed, of_seed in fingerprints.items()
        if all(fingerprint in scored for fingerprint in of_seed)
    }


def too_few(what: str, seeds: int, failed: Iterable[str]) -> UserError:
    """The error that fewer seeds than an interval needs were left: why, and what would work."""
    return UserError(
        f"fewer than {LEAST_SEEDS} of {seeds} seeds {what} completed: {'; '.join(failed)}. What diverged is not "
        f"tried again from the same seed; --seeds {2 * seeds} tries as many more."
    )


class BlockLosses:
    """Sums of losses by block; the sums of each set of networks are worked out once."""

    def __init__(self, log: PreparedLog, blocks: Blocks, retrainings: Retrainings) -> None:
        """Losses on the log's test split, whose `blocks` these are."""
        self.blocks = blocks
        self._split, self._rate = log.split(SPLIT), log.schema.negative_sampling_rate
        self._retrainings = retrainings
        self._known: dict[tuple[int, ...], Floats] = {}

    def __call__(self, records: BySeed, seeds: Iterable[int]) -> Floats:
        """Sums of losses by seed and block (S, K)."""
        sums = []
        for seed in seeds:
            key = tuple(record.number for record in records[seed])
            if key not in self._known:
                logits = [self._retrainings.logits(record) for record in records[seed]]
                self._known[key] = block_sums(logits, self._split, self._rate, self.blocks)
            sums.append(self._known[key])
        return np.stack(sums)

    def ne(self, records: BySeed, seeds: Iterable[int]) -> float:
        """NE on test, the mean over seeds."""
        weights = example_weights(self._split.labels, self._split.weight, self._rate)
        rows = float(self._split.rows if weights is None else weights.sum())
        base_rate = float(np.average(self._split.labels, weights=weights))
        return float(self(records, seeds).sum(axis=1).mean()) / rows / entropy(base_rate)


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

    The winners are those that the study has chosen (`trials.records.findings`); a study that was finished
    before choices were noted has them chosen now, by the same rule.

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
        UserError: for too few seeds, a column that is not categorical, if the baseline was not trained or
            nothing won, or if fewer than two seeds of any winner completed.
    """
    if study.baseline is None or not study.front:
        raise UserError("no candidate and baseline have completed yet, so there is nothing to compare.")
    seed_range = fresh_seeds(study.seed, seeds)
    blocks = blocks_of(log, log.split(SPLIT), block_by)
    numbers = [winner.trial for winner in _chosen(study) if winners is None or winner.trial in winners]
    compared = [study.networks(study.trial(number)) for number in (study.baseline, *numbers)]
    wanted = confirming(study, log, seeds=seeds, winners=numbers)
    done = retrainings.run(wanted, score=SPLIT, has_time_for=has_time_for)
    reference, *own = (by_seed(networks, study, log, seed_range, done) for networks in compared)
    # each winner's retrainings, and the seeds from which the baseline was trained too
    pairs = [
        (number, retrained, tuple(sorted(set(retrained) & set(reference))))
        for number, retrained in zip(numbers, own, strict=True)
    ]
    pairs = [pair for pair in pairs if len(pair[-1]) >= LEAST_SEEDS]
    failed = retrainings.failures(wanted)
    if not pairs:
        raise too_few("of every winner, or of the baseline,", seeds, failed)
    losses = BlockLosses(log, blocks, retrainings)
    estimates = [
        paired_bootstrap(losses(retrained, common), losses(reference, common))
        for _, retrained, common in pairs
    ]
    adjusted = holm([estimate.p for estimate in estimates])
    comparisons = []
    for (number, retrained, common), estimate, p in zip(pairs, estimates, adjusted, strict=True):
        low, high = estimate.interval()
        comparison = Comparison(
            trial=number,
            seeds=common,
            blocks=blocks.count,
            blocked_by=blocks.by,
            ne=losses.ne(retrained, common),
            baseline_ne=losses.ne(reference, common),
            difference_percent=estimate.percent,
            low_percent=low,
            high_percent=high,
            p=estimate.p,
            p_adjusted=p,
            winners=len(pairs),
            detectable_percent=estimate.detectable(len(pairs)),
            better=better(estimate.percent, p),
            refit=all(record.job.refit is not None for records in retrained.values() for record in records),
        )
        comparisons.append(comparison)
    ledger.replace_comparisons(tuple(comparisons))
    return tuple(comparisons), failed


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


def _chosen(study: StudyRecord) -> tuple[Winner, ...]:
    return study.choice.winners if study.choice else winners_of(study, study.best)


def better(percent: float, p_adjusted: float) -> WinnerVerdict:
    """Whether a model is better than the reference, by a relative difference that is significant at 5 %."""
    if p_adjusted > 1.0 - CONFIDENCE:
        return WinnerVerdict.CANNOT_TELL
    return WinnerVerdict.YES if percent < 0.0 else WinnerVerdict.NO
