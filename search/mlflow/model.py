"""A bundle in MLflow's registry: the model that `mlflow models serve -m models:/NAME@best` serves.

A version is known by the identity of its weights, in one of its tags: what is registered again is found, and only
its description is brought up to date.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dashboards.names import decimals, percent, short_name, si
from dashboards.sentences.winners import interval
from dhen.errors import UserError
from search.bundles.bundle import Bundle, read_bundle
from search.mlflow.store import (
    VARIABLE,
    check_server,
    check_store,
    database,
    mlflow_errors,
    open_client,
    store_uri,
)
from trials.records.study_record import relative_ne_percent

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ALIAS, ARTIFACT = "best", "bundle"
"""Alias of the version that counts, and name of the model's artifact that is the bundle's folder."""
IDENTITY = "dhen.identity"
"""Tag of a version by which it is found again."""
EXPERIMENT = "dhen-search models"
"""Experiment of models whose study has none in the same place."""
CODE = Path(__file__).with_name("served_model.py")
REQUIREMENTS = ("dhen-search", "mlflow", "torch", "numpy", "pandas", "pyarrow", "safetensors")
"""Distributions that the process which serves must have, in the versions that are installed here."""


@contextmanager
def registry(bundle: Path, tracking: str | None) -> Iterator[tuple[MlflowClient, str]]:
    """A client of the place where a bundle is to be registered, and its address; its errors become a UserError.

    Raises:
        UserError: if no registry is named, or it does not answer.
    """
    source, given = ("--tracking", tracking) if tracking else (VARIABLE, os.environ.get(VARIABLE))
    directory = Path(given) if given else bundle.absolute().parent
    own = database(directory).exists()
    if own:
        check_store(directory)
    elif not given:
        raise UserError(
            f"{bundle}: name with --tracking where to register the model, a tracking server such as "
            "http://tracking.example:5000 or a run directory such as runs/demo."
        )
    uri = store_uri(directory) if own else check_server(str(given), source)
    with mlflow_errors(uri, own=own):
        yield open_client(uri), uri


def register_bundle(
    client: MlflowClient, folder: Path, name: str | None = None, experiment: str | None = None
) -> ModelVersion:
    """Returns the registered model's version that holds a bundle, made if there is none; its alias is `best`.

    Args:
        client: client of the store that has the registry.
        folder: folder of the bundle.
        name: name of the registered model; by default that of the bundle's study.
        experiment: id of the experiment that has the run; by default the study's, else that of models without one.

    Raises:
        UserError: if the folder is no bundle.
    """
    bundle = read_bundle(folder)
    model = re.sub(r"[/:]", "-", name or bundle.info.study)
    # MLflow's conditions know no escapes; a name with both quotes is refused
    condition = f'name = "{model}"' if "'" in model else f"name = '{model}'"
    if experiment is None:
        named = (client.get_experiment_by_name(each) for each in (bundle.info.study, EXPERIMENT))
        ids = [each.experiment_id for each in named if each is not None and each.lifecycle_stage == "active"]
        experiment = ids[0] if ids else str(client.create_experiment(EXPERIMENT))
    its_trial = f"tags.`trial.number` = '{bundle.info.trial}'"
    if bundle.info.job is not None:  # also of one that was trained once more the run is of its first training
        its_trial += f" and tags.fingerprint = '{bundle.info.job.replace(refit=None).fingerprint}'"
    run = next(iter(client.search_runs([experiment], its_trial, max_results=1)), None)
    run_id = run.info.run_id if run else None
    description = _description(bundle, experiment, run_id)
    same = [
        version
        for version in client.search_model_versions(condition)
        if version.tags.get(IDENTITY) == bundle.version.identity and version.status == "READY"
    ]
    version = max(same, key=lambda each: int(each.version), default=None)
    if version is None:
        if not client.search_registered_models(condition, max_results=1):
            client.create_registered_model(model)
        info = bundle.info
        tags = {
            "study": info.study,
            "trial.number": str(info.trial),
            "log.fingerprint": info.log.fingerprint,
            "flops": f"{info.flops:.0f}",
            "best_ne": f"{info.validation.ne:.6f}",
        }
        with tempfile.TemporaryDirectory() as temporary:
            write_model(bundle, Path(temporary) / "model")
            logged = client.create_logged_model(
                experiment, name=re.sub(r"[/:.%\"']", "-", model), source_run_id=run_id, tags=tags
            )
            client.log_model_artifacts(logged.model_id, str(Path(temporary) / "model"))
        client.finalize_logged_model(logged.model_id, "READY")
        # the identity comes with the last request: a version that was cut short is not taken for a whole one
        version = client.create_model_version(
            model,
            source=logged.artifact_location,
            run_id=run_id,
            tags=tags | {IDENTITY: bundle.version.identity},
            description=description,
            model_id=logged.model_id,
        )
    if version.description != description:
        client.update_model_version(model, version.version, description)
    if str(client.get_registered_model(model).aliases.get(ALIAS)) != str(version.version):
        client.set_registered_model_alias(model, ALIAS, version.version)
    return version


def _description(bundle: Bundle, experiment: str, run_id: str | None) -> str:
    """Returns what a user wants to know of the model before serving it, in Markdown."""
    info, comparison = bundle.info, bundle.info.comparison
    relative, baseline = "", info.baseline_validation
    if baseline:
        relative = f", {percent(relative_ne_percent(info.validation.ne, baseline.ne))} against the baseline's"
    verdict = "Not confirmed: `dhen-search confirm` tests whether it is better than the baseline beyond noise"
    if comparison:
        verdict = (
            f"Better than the baseline, retrained from {len(comparison.seeds)} seeds: {comparison.better} "
            f"({percent(comparison.difference_percent)}, 95 % interval {interval(comparison)})"
        )
    elif info.validation == baseline:
        verdict = "It is the tuned baseline"
    models = ", ".join(f"`{short_name(job.model.to_dict())}`" for job in info.jobs)
    lines = [
        f"Trial {info.trial} of the study {info.study}: {'the average of ' if info.members else ''}{models}.",
        f"- NE on validation {decimals(info.validation.ne, 5)}{relative}",
        f"- NE on test {decimals(info.test.ne, 5)}" if info.test else None,
        f"- {verdict}",
        f"- {si(info.flops)} FLOPs per example, {si(info.parameters)} dense parameters",
        f"- Version {bundle.version.number} of its weights, increments included"
        if bundle.increments
        else None,
        f"\n[The trial's run](#/experiments/{experiment}/runs/{run_id})" if run_id else None,
    ]
    return "\n".join(line for line in lines if line)


def write_model(bundle: Bundle, folder: Path) -> None:
    """Writes the files of an MLflow model: code, the bundle without checkpoints of online training, signature."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, Schema, TensorSpec

    encoding, schema = bundle.encoding, bundle.encoding.schema
    any_value = AnyType()  # type: ignore[no-untyped-call]
    # numbers as such; any value elsewhere, since an id may be a number or text, a multi-hot value a list or text
    columns: list[ColSpec | TensorSpec] = [
        ColSpec("double" if name in schema.numeric else any_value, name) for name in schema.inputs
    ]
    # two rows, usual values and none: the mean of a numeric column, the most frequent value of another
    example: dict[str, list[Any]] = {}
    for name in schema.inputs:
        usual: Any = None
        vocabulary, column = encoding.vocabularies.get(name), schema.multi_hot.get(name)
        if name in schema.numeric:
            at_mean = np.zeros((1, len(encoding.features.numeric)), dtype=np.float32)
            usual = float(encoding.numbers(name, at_mean)[0])
        elif vocabulary is not None and vocabulary.values is not None and len(vocabulary):
            value = vocabulary.values[0].as_py()
            usual = value if column is None or column.separator is not None else [value]
        example[name] = [usual, None]
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=folder.parent) as copies:
        copy = Path(copies) / bundle.directory.resolve().name
        shutil.copytree(bundle.directory, copy, ignore=shutil.ignore_patterns(".*"))
        # its advice on type hints is for models whose signature is not given
        warnings.simplefilter("ignore")
        import mlflow.pyfunc
        import pandas as pd

        mlflow.pyfunc.save_model(
            str(folder),
            python_model=str(CODE),
            artifacts={ARTIFACT: str(copy)},
            signature=ModelSignature(inputs=Schema(columns), outputs=Schema([ColSpec("double")])),
            # as objects: a missing number is null in the example's JSON too
            input_example=pd.DataFrame(example, dtype=object),
            pip_requirements=requirements(),
        )


def requirements() -> list[str]:
    """Returns what serving needs, pinned; without what a version has of its build, such as `+cpu`."""
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in REQUIREMENTS]
