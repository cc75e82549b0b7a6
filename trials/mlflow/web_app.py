"""MLflow's own web app on a study's store, to be served beside other pages: what `mlflow server` would serve.

`mlflow server` sets variables and starts uvicorn on `mlflow.server.fastapi_app`; here the same variables are set
and the same app is loaded into a server of ours (decision 42).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from search.mlflow.store import ENVIRONMENT, artifacts, check_store, store_uri

Message = MutableMapping[str, Any]
WebApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""An ASGI app."""


def mlflow_web_app(directory: Path) -> WebApp:
    """Loads the app, which takes seconds, for the store of a run directory; one per process.

    The caller checks who may ask: the names under which this machine is asked for are not checked again.

    Raises:
        UserError: when the store is damaged, locked or cannot be written.
    """
    check_store(directory)
    store, files = store_uri(directory), artifacts(directory).absolute().as_uri()
    os.environ.update(ENVIRONMENT)
    os.environ |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_SERVER_ALLOWED_HOSTS": "*"}
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    os.environ |= {constants.BACKEND_STORE_URI_ENV_VAR: store, constants.ARTIFACT_ROOT_ENV_VAR: files}
    initialize_backend_stores(store, store, files)
    _keep_to(artifacts(directory).resolve())
    from mlflow.server.fastapi_app import app

    served: WebApp = app
    return served


def _keep_to(folder: Path) -> None:
    """Has MLflow read, write and list files of this folder alone, whatever place an experiment, a model or a trace
    names: by a place of its own, anyone who may write to the store could have this user's other files.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
    from mlflow.server import handlers
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    def own_files(uri: str, **stores: str | None) -> LocalArtifactRepository:
        # MLflow itself follows links below the place that it was given
        if urlsplit(uri).scheme in ("", "file"):
            repository = LocalArtifactRepository(uri, **stores)
            if Path(repository.artifact_dir).resolve().is_relative_to(folder):
                return repository
        raise MlflowException(f"{uri}: only files below {folder} are served here.", PERMISSION_DENIED)

    repositories: dict[str, Any] = get_registered_artifact_repositories()
    for scheme in set(repositories) - {"runs", "models"}:  # these look the place up, and ask again
        repositories[scheme] = own_files
    store: Any = handlers._get_tracking_store()
    create = store.create_experiment

    def create_inside(name: str, artifact_location: str | None = None, tags: Any = None) -> str:
        if artifact_location:
            own_files(artifact_location)
        return str(create(name, artifact_location, tags))

    store.create_experiment = create_inside
