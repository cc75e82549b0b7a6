"""What `plan` is asked about: a model, its inputs and how it trains, from a file, a bundle or a log.

A file holds `model`, `schema` (the tables with their rows, the numeric inputs) and `training`; none of it
needs data. A file with a model alone, or a shipped model's name, takes its inputs from a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from dhen.config import DhenConfig, ModelConfig
from dhen.errors import UserError, unknown_name
from dhen.model import catalog, named_model, parse_model
from dhen.schema import FeatureSchema
from dhen.values import load_yaml, parse
from search.bundles.bundle import is_bundle, read_bundle
from search.config import CONFIGURATION_KEYS, HELD_KEYS, LOG_KEYS
from search.dataset import open_log
from search.execution.step_correction import StepCorrections
from search.log_config import LogConfig, set_override
from trials.cluster.cluster import Cluster
from trials.cluster.machine import BF16_GAIN, Precision
from trials.cluster.this_machine import THIS
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan, plan_in_least_shape
from trials.records.job import TrainingConfig

EXAMPLE = "schema: {tables: [{name: site, rows: 1000000}], numeric: 13}"


class PlanRequest(NamedTuple):
    """A configuration to plan for."""

    model: ModelConfig
    schema: FeatureSchema
    training: TrainingConfig
    """Training settings with a batch size, which is that over all ranks; the precision may be `auto`."""


def read_request(
    what: str | Mapping[str, Any],
    log_config: LogConfig | None,
    overrides: tuple[str, ...],
    member: int | None = None,
    given: Mapping[str, Any] | None = None,
) -> PlanRequest:
    """The request in a bundle, a YAML file, a shipped model's name, or what such a file would hold; a log gives
    the inputs instead, if there is one.

    `member` says which network is meant in a bundle that is an average. Keys that are `given` replace those of the
    file.

    Raises:
        UserError: naming the key, what was received and what would work.
    """
    plain = _plain(what, member) if isinstance(what, str) else _request(deepcopy(dict(what)))
    raw = {str(key): value for key, value in plain.items()}  # YAML has keys that are no text
    raw |= given or {}
    what = what if isinstance(what, str) else "plan"
    for unknown in sorted(set(raw) - set(CONFIGURATION_KEYS)):
        raise UserError(f"{what}: {unknown_name('key', unknown, CONFIGURATION_KEYS)}")
    given_too = [word for word in overrides if word.partition("=")[0].split(".")[0] == "schema"]
    if log_config and (given_too or "schema" in (given or {})):
        raise UserError(
            f"{what}: {given_too[0] if given_too else 'schema'} and a log both say what the inputs are; leave "
            "one of the two out."
        )
    if isinstance(raw.get("model"), str) and any(word.startswith("model.") for word in overrides):
        raw["model"] = named_model(raw["model"]).to_dict()
    for word in overrides:
        set_override(raw, word)
    for unknown in sorted(set(raw) - set(CONFIGURATION_KEYS)):
        raise unknown_name("key", unknown, (*CONFIGURATION_KEYS, *HELD_KEYS, *LOG_KEYS))
    model = raw.get("model")
    if model is None:
        raise UserError(f"{what}: the key 'model' is missing: a model's configuration, or the name of one.")
    model = named_model(model) if isinstance(model, str) else parse_model(model, f"{what}: model")
    training = parse(TrainingConfig, raw.get("training") or {}, f"{what}: training")
    if log_config:
        log = open_log(log_config)
        schema = log.features
        batch_size = training.resolved(log.manifest.rows["train"], "fp32").batch_size
        training = training.replace(batch_size=batch_size)
    else:
        schema = _schema(raw.get("schema"), what)
    if training.batch_size is None:
        raise UserError(
            f"{what}: training.batch_size is missing, the examples of a step over all ranks; "
            f"write it in the file or add training.batch_size=65536."
        )
    return PlanRequest(model, schema, training)


def log_to_read(data: tuple[str, ...], given: dict[str, Any]) -> LogConfig | None:
    """Takes the keys that say how a log is read out of what is given; None if there is no log.

    Raises:
        UserError: if one of them is wrong, or given without a log.
    """
    reading = {key: given.pop(key) for key in LOG_KEYS if key in given}
    if not data and reading:
        raise UserError(f"{min(reading)} says how a log is read; name one with --data.")
    return parse(LogConfig, {"data": data} | reading, "plan") if data else None


def for_cluster(training: TrainingConfig, cluster: Cluster) -> TrainingConfig:
    """Training settings with the precision that `auto` means on a cluster: bf16 if it is clearly faster."""
    peak = cluster.peak_flops
    faster: Precision = "bf16" if peak.bf16 > BF16_GAIN * peak.fp32 else "fp32"
    precision = faster if training.precision == "auto" else training.precision
    return training.replace(precision=precision)


def _plain(what: str, member: int | None) -> dict[str, Any]:
    """The request as plain data, with some of `CONFIGURATION_KEYS`."""
    path = Path(what)
    if is_bundle(path) or path.is_dir():
        job = read_bundle(path).job(member)
        return {
            "model": job.model.to_dict(),
            "schema": job.features.to_dict(),
            "training": job.training.to_dict(),
        }
    if member is not None:
        raise UserError(
            f"member {member} names a network of a bundle that is an average; {what} is no bundle."
        )
    if path.exists():
        data = load_yaml(path)
        if not isinstance(data, dict):
            raise UserError(
                f"{what}: expected a mapping with {', '.join(CONFIGURATION_KEYS)}, or a model alone."
            )
        return _request(data)
    if what in catalog():
        return {"model": what}
    names = ", ".join(sorted(catalog()))
    raise UserError(f"{what!r} is no bundle, no configuration file and no shipped model ({names}).")


def _request(data: dict[str, Any]) -> dict[str, Any]:
    """The content of a file, which may be a model alone."""
    return data if "model" in data or "schema" in data else {"model": data}


def _schema(data: object, what: str) -> FeatureSchema:
    """The inputs as written; a number of numeric inputs stands for so many names."""
    if data is None:
        raise UserError(
            f"{what}: the key 'schema' is missing, which says what the model's inputs are. Write it, "
            f"e.g. {EXAMPLE}, or name a log with --data."
        )
    if isinstance(data, dict) and type(data.get("numeric")) is int:
        if data["numeric"] < 0:
            raise UserError(f"{what}: schema.numeric: expected names or a number of at least 0.")
        data = data | {"numeric": [f"numeric{index}" for index in range(data["numeric"])]}
    return parse(FeatureSchema, data, f"{what}: schema")


def in_least_shape(request: PlanRequest, shapes: Sequence[Cluster], options: PlanOptions) -> Plan:
    """The plan for a cluster in the least of its shapes in which a strategy fits; for this machine, with the
    seconds that its steps were found to take.

    Raises:
        UserError: if it can be planned in none.
    """
    training = for_cluster(request.training, shapes[0])
    found = plan_in_least_shape(request.model, request.schema, training, shapes, options=options)
    # the choice is made; what is shown is corrected
    return StepCorrections.here(tuple(shapes)).of_plan(found) if found.cluster == THIS else found


def fits_nowhere(
    request: PlanRequest, shapes: Sequence[Cluster], cluster_plan: Plan, options: PlanOptions
) -> bool:
    """Whether a plan failed in a way that neither a smaller batch nor fewer layers mend."""
    if cluster_plan.chosen is not None:
        return False
    # the fewest with which a technique is on the ladder: a layer per stage, an example per micro-batch of a rank
    technique, layers, examples = options.technique, 1, 1
    if technique is not None:
        layers = technique.pipeline * technique.chunks_per_rank
        examples = max(technique.micro_batches, 2 if technique.no_sync else 1)
    cluster = shapes[-1]
    model, training = request.model, for_cluster(request.training, cluster)
    if isinstance(model, DhenConfig):
        model = model.replace(layers=model.layers[:layers])
    smallest = training.replace(batch_size=cluster.ranks * examples)
    return plan(model, request.schema, smallest, cluster, options=options).chosen is None
