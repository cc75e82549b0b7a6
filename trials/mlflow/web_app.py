"""MLflow's own web app on a study's store, to be served beside other pages: what `mlflow server` would serve.

`mlflow server` sets variables and starts uvicorn on `mlflow.server.fastapi_app`; here the same variables are set
and the same app is loaded into a server of ours (decision 42).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from trials.mlflow.store import ENVIRONMENT, artifacts, check_store, store_uri

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
    from mlflow.server.fastapi_app import app

    served: WebApp = app
    return served
