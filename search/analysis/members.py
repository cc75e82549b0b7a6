"""What each member of an average is worth: left out of the mean in turn, with the same trainings of the others.

Nothing but the members' retrainings is needed, which `confirm` makes too. The logits that it keeps are on test, so
NE is compared there: where the average is confirmed from these seeds that is no further look at the split, and
else the looks are counted, and `confirm` need not take them again. Differences have the intervals of
`search.analysis.statistics.bootstrap`, for each member by itself.
"""

from __future__ import annotations

from search.analysis.ablate import most_valuable_first, part_of
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
from search.analysis.statistics.bootstrap import paired_bootstrap
from search.execution.retraining import SPLIT, Retrainings
from trials.analyses import Ablation, MeanInterval
from trials.data.cache import PreparedLog
from trials.data.example_weights import Floats
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord


def ablate_average(
    study: StudyRecord,
    trial: TrialRecord,
    log: PreparedLog,
    retrainings: Retrainings,
    *,
    seeds: int,
    block_by: str | None = None,
) -> Ablation:
    """The ablation of an average of a finished study; what is trained already is not trained again.

    Args:
        study: the study, whose selection is frozen.
        trial: the average.
        log: the study's log.
        retrainings: the study's retrainings.
        seeds: number of trainings of each member; a seed from which a member failed does not count.
        block_by: the column of `search.analysis.losses.blocks_of`.

    Raises:
        UserError: for too few seeds, a column that is not categorical, or fewer than two seeds from which all
            completed.
    """
    assert trial.kind is TrialKind.AVERAGE
    seed_range, networks = fresh_seeds(study.seed, seeds), study.networks(trial)
    losses = BlockLosses(log, blocks_of(log, log.split(SPLIT), block_by), retrainings)
    wanted = wanted_from(networks, study, log, seed_range)
    whole = by_seed(networks, study, log, seed_range, retrainings.run(wanted, score=SPLIT))
    if len(whole) < LEAST_SEEDS:
        raise too_few(f"of all members of trial {trial.number}", seeds, retrainings.failures(wanted))
    reference_SK, flops = losses(whole, whole), sum(network.job.flops or 0.0 for network in networks)
    parts = [
        part_of(
            _name(member),
            _interval(losses(_without(index, whole), whole), reference_SK),
            flops - (member.job.flops or 0.0),
            flops,
        )
        for index, member in enumerate(networks)
    ]
    return Ablation(
        trial=trial.number,
        seeds=tuple(whole),
        split=SPLIT,
        blocked_by=losses.blocks.by,
        flops=flops,
        parts=most_valuable_first(parts),
    )


def _name(member: TrialRecord) -> str:
    return f"{'retraining' if member.kind is TrialKind.RETRAINING else 'trial'} {member.number}"


def _without(index: int, whole: BySeed) -> BySeed:
    return {seed: retrained[:index] + retrained[index + 1 :] for seed, retrained in whole.items()}


def _interval(rest_SK: Floats, whole_SK: Floats) -> MeanInterval:
    difference = paired_bootstrap(rest_SK, whole_SK)
    low, high = difference.interval()
    return MeanInterval(mean=difference.percent, low=low, high=high)
