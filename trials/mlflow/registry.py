"""A model in MLflow's registry: its versions, and the alias `best` on the one that counts.

A version is known by the identity of what it holds, in one of its tags: what is registered again is found, and
only its description is brought up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

ALIAS = "best"
IDENTITY = "dhen.identity"
"""Tag of a version by which it is found again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContents:
    """What is said of a version of a model, beside its files."""

    name: str
    """Name of the registered model."""
    identity: str
    """What tells the version from others."""
    description: str
    tags: dict[str, str]


def model_name(name: str) -> str:
    """Returns a name as MLflow allows it for a registered model."""
    return re.sub(r"[/:]", "-", name)


def register(
    client: MlflowClient,
    contents: ModelContents,
    write_files: Callable[[Path], None],
    *,
    experiment: str,
    run: Run | None,
) -> ModelVersion:
    """Returns the version that holds these contents, made where there is none, with the alias `best` on it.

    Args:
        client: client of the store that has the registry.
        contents: what the version is known by, and what is said of it.
        write_files: writes the files of the MLflow model into a folder that is not there yet.
        experiment: id of the experiment that a new model belongs to.
        run: run of the trial that the model comes from; None where none is known.
    """
    version = _version(client, contents)
    if version is None:
        version = _new_version(client, contents, write_files, experiment, run)
    if version.description != contents.description:
        client.update_model_version(contents.name, version.version, contents.description)
    aliases = client.get_registered_model(contents.name).aliases
    if str(aliases.get(ALIAS)) != str(version.version):
        client.set_registered_model_alias(contents.name, ALIAS, version.version)
    return version


def _version(client: MlflowClient, contents: ModelContents) -> ModelVersion | None:
    """Returns the newest version with this identity that is ready, where there is one."""
    versions = client.search_model_versions(f"name = {_quoted(contents.name)}")
    same = [
        version
        for version in versions
        if version.tags.get(IDENTITY) == contents.identity and version.status == "READY"
    ]
    return max(same, key=lambda version: int(version.version), default=None)


def _new_version(
    client: MlflowClient,
    contents: ModelContents,
    write_files: Callable[[Path], None],
    experiment: str,
    run: Run | None,
) -> ModelVersion:
    """Logs the files as a model of the run, and makes a version of it; the tag comes with the last request, so
    that a version that was cut short is not taken for a whole one."""
    if not client.search_registered_models(f"name = {_quoted(contents.name)}", max_results=1):
        client.create_registered_model(contents.name)
    run_id = run.info.run_id if run else None
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_files(folder)
        logged = client.create_logged_model(
            experiment, name=_logged_name(contents.name), source_run_id=run_id, tags=contents.tags
        )
        client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, "READY")
    return client.create_model_version(
        contents.name,
        source=logged.artifact_location,
        run_id=run_id,
        tags=contents.tags | {IDENTITY: contents.identity},
        description=contents.description,
        model_id=logged.model_id,
    )


def _quoted(name: str) -> str:
    """Returns a name as MLflow's conditions have it, which know no escapes; a name with both quotes is refused."""
    return f'"{name}"' if "'" in name else f"'{name}'"


def _logged_name(name: str) -> str:
    """Returns a name as MLflow allows it for a logged model."""
    return re.sub(r"[/:.%\"']", "-", name)
