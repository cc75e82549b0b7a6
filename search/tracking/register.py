"""A bundle in MLflow's registry: the model that `mlflow models serve -m models:/NAME@best` serves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.names import short_name
from dashboards.sentences.winners import interval
from dashboards.units import decimals, percent, si
from search.bundles.bundle import Bundle, read_bundle
from search.tracking.model_files import write_model
from trials.mlflow.registry import ModelContents, model_name, register
from trials.study_record import relative_ne_percent

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

EXPERIMENT = "dhen-search models"
"""Experiment of models whose study has none in the same place."""


def register_bundle(
    client: MlflowClient,
    folder: Path,
    *,
    name: str | None = None,
    experiment: str | None = None,
    run: str | None = None,
) -> ModelVersion:
    """Returns the version of the registered model that holds a bundle, with the alias `best` on it.

    Args:
        client: client of the store that has the registry.
        folder: folder of the bundle.
        name: name of the registered model; by default that of the bundle's study.
        experiment: id of the experiment that has the run; looked for where not given.
        run: id of the run of the bundle's trial; looked for where not given.

    Raises:
        UserError: where the folder is no bundle.
    """
    bundle = read_bundle(folder)
    own_experiment = experiment or _experiment(client, bundle)
    own_run = client.get_run(run) if run else _run(client, own_experiment, bundle)
    contents = ModelContents(
        name=model_name(name or bundle.info.study),
        identity=bundle.version.identity,
        description=_description(bundle, own_experiment, own_run),
        tags=_tags(bundle),
    )
    write = partial(write_model, bundle)
    return register(client, contents, write, experiment=own_experiment, run=own_run)


def _experiment(client: MlflowClient, bundle: Bundle) -> str:
    """Returns the experiment of the bundle's study, or that of models without one."""
    for name in (bundle.info.study, EXPERIMENT):
        experiment = client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "active":
            return str(experiment.experiment_id)
    return str(client.create_experiment(EXPERIMENT))


def _run(client: MlflowClient, experiment: str, bundle: Bundle) -> Run | None:
    """Returns the run of the bundle's trial; None for a network that the experiment knows nothing of."""
    condition = f"tags.`trial.number` = '{bundle.info.trial}'"
    if bundle.info.job is not None:  # also of one that was trained once more the run is of its first training
        condition += f" and tags.fingerprint = '{bundle.info.job.replace(refit=None).fingerprint}'"
    return next(iter(client.search_runs([experiment], condition, max_results=1)), None)


def _tags(bundle: Bundle) -> dict[str, str]:
    info = bundle.info
    return {
        "study": info.study,
        "trial.number": str(info.trial),
        "log.fingerprint": info.log.fingerprint,
        "flops": f"{info.flops:.0f}",
        "best_ne": f"{info.validation.ne:.6f}",
    }


def _without_comparison(bundle: Bundle) -> str:
    if bundle.info.validation == bundle.info.baseline_validation:
        return "It is the tuned baseline"
    return "Not confirmed: `dhen-search confirm` says whether it is better than the baseline beyond noise"


def _description(bundle: Bundle, experiment: str, run: Run | None) -> str:
    """Returns what a user wants to know of the model before serving it, in Markdown."""
    info, comparison = bundle.info, bundle.info.comparison
    relative = ""
    if info.baseline_validation:
        difference = percent(relative_ne_percent(info.validation.ne, info.baseline_validation.ne))
        relative = f", {difference} against the baseline's"
    models = ", ".join(f"`{short_name(job.model.to_dict())}`" for job in info.jobs)
    what = "the average of " if info.members else ""
    lines = [
        f"Trial {info.trial} of the study {info.study}: {what}{models}.",
        f"- NE on validation {decimals(info.validation.ne, 5)}{relative}",
        f"- NE on test {decimals(info.test.ne, 5)}" if info.test else None,
        f"- Better than the baseline, retrained from {len(comparison.seeds)} seeds: {comparison.better} "
        f"({percent(comparison.difference_percent)}, 95 % interval {interval(comparison)})"
        if comparison
        else f"- {_without_comparison(bundle)}",
        f"- {si(info.flops)} FLOPs per example, {si(info.parameters)} dense parameters",
        f"- Version {bundle.version.number} of its weights, increments included"
        if bundle.increments
        else None,
        f"\n[The trial's run](#/experiments/{experiment}/runs/{run.info.run_id})" if run else None,
    ]
    return "\n".join(line for line in lines if line)
