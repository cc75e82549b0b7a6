"""Trials retrained from fresh seeds and scored on the test split: their results and their losses, by seed.

The seeds are other than the study's, because the training that won was chosen for its luck too. For an average
every member is retrained from each seed, and the mean of what they predict is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dhen.errors import UserError
from search.analysis.losses import Blocks, block_sums
from search.execution.jobs import refit_job, trained_job
from search.execution.retraining import SPLIT, RetrainingRequest, Retrainings
from trials.data.cache import PreparedLog
from trials.data.example_weights import Floats, example_weights
from trials.job import Job
from trials.metrics import entropy
from trials.record import TrialRecord
from trials.study_record import StudyRecord

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
    apart. Without `job_of` it is trained as the study's winners were: once more on validation too, where they
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
        return np.stack([self._sums(records[seed]) for seed in seeds])

    def ne(self, records: BySeed, seeds: Iterable[int]) -> float:
        """NE on test, the mean over seeds."""
        weights = example_weights(self._split, self._rate)
        rows = float(self._split.rows if weights is None else weights.sum())
        base_rate = float(np.average(self._split.labels, weights=weights))
        return float(self(records, seeds).sum(axis=1).mean()) / rows / entropy(base_rate)

    def _sums(self, records: tuple[TrialRecord, ...]) -> Floats:
        key = tuple(record.number for record in records)
        if key not in self._known:
            logits = [self._retrainings.logits(record) for record in records]
            self._known[key] = block_sums(logits, self._split, self._rate, self.blocks)
        return self._known[key]
