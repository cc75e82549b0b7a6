"""What each part of a winner is worth: removed in turn, the rest trained again from the same seeds.

NE is compared on validation: the test split is for the question whether a winner is one. The interval is over
seeds, for each part by itself. The parts of an average are its members (`search.analysis.members`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dhen.config import DhenConfig, ModelConfig
from dhen.cost import headline_flops
from dhen.errors import UserError
from dhen.model import model_cost, parse_model
from search.analysis.scored import fresh_seeds
from search.analysis.statistics.bootstrap import CONFIDENCE
from search.analysis.statistics.t_interval import compared
from search.execution.jobs import trained_job
from search.execution.retraining import RetrainingRequest, Retrainings
from trials.analyses import Ablation, MeanInterval, Part
from trials.data.cache import PreparedLog
from trials.job import Job
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord


def without_parts(model: ModelConfig) -> dict[str, DhenConfig]:
    """The model without each module, each layer, all members but one, by what is removed; equal variants once.

    A layer's only module is the layer.

    Raises:
        UserError: for a family without layers, or a model that is one layer of one module.
    """
    if not isinstance(model, DhenConfig):
        raise UserError(f"a model of the family {model.family!r} has no modules to remove.")
    variants: dict[str, DhenConfig] = {}
    for name, data in _variants(model.to_dict()):
        variant = parse_model(data, name)
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
        part_of(
            name,
            compared(_ne(jobs, done), reference, CONFIDENCE),
            headline_flops(model_cost(variants[name], log.features)),
            whole_flops,
        )
        for name, jobs in rest.items()
    ]
    return Ablation(
        trial=trial.number, seeds=tuple(whole), flops=whole_flops, parts=most_valuable_first(parts)
    )


def part_of(removed: str, ne_percent: MeanInterval | None, flops: float, whole_flops: float) -> Part:
    """A part with its share of the whole's FLOPs; `flops` are those of the rest."""
    share = 100.0 * (whole_flops - flops) / whole_flops
    return Part(removed=removed, ne_percent=ne_percent, flops=flops, flops_percent=share)


def most_valuable_first(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts in order of what NE loses without them; a part whose training failed counts as no loss."""
    return tuple(sorted(parts, key=lambda part: -part.ne_percent.mean if part.ne_percent else 0.0))


def _variants(model: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    layers = list(model["layers"])
    for index, layer in enumerate(layers):
        before, after = layers[:index], layers[index + 1 :]
        modules = list(layer["modules"])
        for position, module in enumerate(modules if len(modules) > 1 else ()):
            rest = layer | {"modules": modules[:position] + modules[position + 1 :]}
            yield f"layer{index}: {module['kind']}", model | {"layers": [*before, rest, *after]}
        if len(layers) > 1:
            parts_from = model.get("members_from", 0)
            moved = {"members_from": parts_from - 1} if index < parts_from else {}
            yield f"layer{index}", model | {"layers": before + after} | moved
    if model.get("members", 1) > 1:
        yield "members", model | {"members": 1}


def _ne(jobs: dict[int, Job], done: dict[str, TrialRecord]) -> list[float | None]:
    """NE of the jobs on validation, by seed; None where a job has no result."""
    records = [done.get(job.fingerprint) for job in jobs.values()]
    return [
        record.result.validation.ne if record is not None and record.result.validation else None
        for record in records
    ]
