"""What each part of a winner is worth: removed in turn, the rest trained again from the same seeds.

NE is compared on validation: the test split is for the question whether a winner is one. The interval is over
seeds, for each part by itself. The parts of an average are its members (below).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dhen.config import DhenConfig, ModelConfig
from dhen.cost import headline_flops
from dhen.errors import UserError
from dhen.model import model_cost, parse_model
from search.analysis.confirm import (
    LEAST_SEEDS,
    BlockLosses,
    by_seed,
    fresh_seeds,
    too_few,
    wanted_from,
)
from search.analysis.losses import blocks_of
from search.analysis.statistics import CONFIDENCE, compared, paired_bootstrap
from search.execution.retraining import SPLIT, RetrainingRequest, Retrainings
from search.execution.trainer import trained_job
from trials.data.prepared_log import PreparedLog
from trials.records.findings import AblatedPart, Ablation, MeanInterval
from trials.records.job import Job
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind, TrialRecord


def without_parts(model: ModelConfig) -> dict[str, DhenConfig]:
    """The model without each module, each layer, all members but one, by what is removed; equal variants once.

    A layer's only module is the layer.

    Raises:
        UserError: for a family without layers, or a model that is one layer of one module.
    """
    if not isinstance(model, DhenConfig):
        raise UserError(f"a model of the family {model.family!r} has no modules to remove.")
    data = model.to_dict()
    layers, split = data["layers"], data.get("members_from", 0)
    drafts: list[tuple[str, dict[str, Any]]] = []
    for index, layer in enumerate(layers):
        before, after, modules = layers[:index], layers[index + 1 :], layer["modules"]
        for position, module in enumerate(modules if len(modules) > 1 else ()):
            rest = layer | {"modules": modules[:position] + modules[position + 1 :]}
            drafts.append((f"layer{index}: {module['kind']}", {"layers": [*before, rest, *after]}))
        if len(layers) > 1:
            moved = {"members_from": split - 1} if index < split else {}
            drafts.append((f"layer{index}", {"layers": before + after} | moved))
    if data.get("members", 1) > 1:
        drafts.append(("members", {"members": 1}))
    variants: dict[str, DhenConfig] = {}
    for name, changes in drafts:
        variant = parse_model(data | changes, name)
        assert isinstance(variant, DhenConfig)
        if variant not in variants.values():
            others = sum(label.partition(" (")[0] == name for label in variants)
            variants[f"{name} ({others + 1})" if others else name] = variant
    if not variants:
        raise UserError("the model is one layer of one module: there is nothing to remove.")
    return variants


def ablate(
    study: StudyRecord, trial: TrialRecord, log: PreparedLog, retrainings: Retrainings, *, seeds: int
) -> Ablation:
    """The ablation of a network of a finished study; what is trained already is not trained again.

    Raises:
        UserError: for too few seeds, or a model that has no parts.
    """
    assert trial.kind is not TrialKind.AVERAGE
    seed_range = fresh_seeds(study.seed, seeds)
    # validation tells the parts apart, so it must not be trained on, whatever `confirm` does
    whole = {seed: trained_job(trial, log, seed_shift=seed - study.seed) for seed in seed_range}
    model = next(iter(whole.values())).model
    variants = without_parts(model)
    rest = {
        name: {seed: job.replace(model=variant) for seed, job in whole.items()}
        for name, variant in variants.items()
    }
    wanted = [RetrainingRequest(trial, job) for job in whole.values()]
    wanted += [RetrainingRequest(trial, job, name) for name, jobs in rest.items() for job in jobs.values()]
    done = retrainings.run(wanted)
    whole_flops = headline_flops(model_cost(model, log.features))
    reference = _ne(whole, done)
    parts = [
        _part(
            name,
            compared(_ne(jobs, done), reference, CONFIDENCE),
            headline_flops(model_cost(variants[name], log.features)),
            whole_flops,
        )
        for name, jobs in rest.items()
    ]
    return Ablation(trial=trial.number, seeds=tuple(whole), flops=whole_flops, parts=_sorted(parts))


def _part(removed: str, ne_percent: MeanInterval | None, flops: float, whole_flops: float) -> AblatedPart:
    """A part with its share of the whole's FLOPs; `flops` are those of the rest."""
    share = 100.0 * (whole_flops - flops) / whole_flops
    return AblatedPart(removed=removed, ne_percent=ne_percent, flops=flops, flops_percent=share)


def _sorted(parts: Iterable[AblatedPart]) -> tuple[AblatedPart, ...]:
    """Parts in order of what NE loses without them; a part whose training failed counts as no loss."""
    return tuple(sorted(parts, key=lambda part: -part.ne_percent.mean if part.ne_percent else 0.0))


def _ne(jobs: dict[int, Job], done: dict[str, TrialRecord]) -> list[float | None]:
    """NE of the jobs on validation, by seed; None if a job has no result."""
    records = [done.get(job.fingerprint) for job in jobs.values()]
    return [
        record.result.validation.ne if record is not None and record.result.validation else None
        for record in records
    ]


# What each member of an average is worth: left out of the mean in turn, with the same trainings of the others.
#
# Nothing but the members' retrainings is needed, which `confirm` makes too. The logits that it keeps are on
# test, so
# NE is compared there: confirming the average from these seeds is no further look at the split, and
# else the looks are counted, and `confirm` need not take them again. Differences have the intervals of
# `search.analysis.statistics`, for each member by itself.


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
    parts = []
    for index, member in enumerate(networks):
        rest = {seed: retrained[:index] + retrained[index + 1 :] for seed, retrained in whole.items()}
        difference = paired_bootstrap(losses(rest, whole), reference_SK)
        low, high = difference.interval()
        name = f"{'retraining' if member.kind is TrialKind.RETRAINING else 'trial'} {member.number}"
        ne_percent = MeanInterval(mean=difference.percent, low=low, high=high)
        parts.append(_part(name, ne_percent, flops - (member.job.flops or 0.0), flops))
    return Ablation(
        trial=trial.number,
        seeds=tuple(whole),
        split=SPLIT,
        blocked_by=losses.blocks.by,
        flops=flops,
        parts=_sorted(parts),
    )
