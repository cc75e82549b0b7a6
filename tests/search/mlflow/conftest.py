"""MLflow's own servers as processes: a tracking server, and one that serves a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
from servers import mlflow_servers

Serve = Callable[..., AbstractContextManager[str]]
Post = Callable[[str, Mapping[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture
def tracking_server() -> Serve:
    """Starts a tracking server on a folder and a port; yields its address once it answers."""
    return mlflow_servers.tracking_server


@pytest.fixture
def model_server() -> Serve:
    """Starts a server of a registered model as a user does; yields where it takes rows."""
    return mlflow_servers.model_server


@pytest.fixture
def post() -> Post:
    """Sends a body of JSON; returns status and answer."""
    return mlflow_servers.post
