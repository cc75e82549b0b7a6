"""Where a study's runs go: the MLflow store of its run directory, or a tracking server or database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.names import trial_name
from dashboards.sentences.summary import study_note
from dhen.errors import UserError
from search.config import StudyConfig
from search.log_config import DEMO
from trials.data.remote import is_url, shown_url
from trials.mlflow.server import LOCAL, VARIABLE, check_server, open_server, server_errors
from trials.mlflow.store import database, open_store, store_errors, store_uri
from trials.mlflow.tracker import Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient


def with_destination(config: StudyConfig, directory: Path) -> StudyConfig:
    """Returns settings that say where runs go: as they say themselves, else as the environment does.

    Raises:
        UserError: if MLflow keeps no runs there, or the settings' address holds a password.
    """
    source, given = ("tracking", config.tracking) if config.tracking else (VARIABLE, os.environ.get(VARIABLE))
    if not given or given == LOCAL:
        return config
    server = check_server(given, source)
    return config.replace(tracking=None if server == store_uri(directory) else server)


def server_of(config: StudyConfig) -> str | None:
    """Returns the address of a study's tracking server or database; None if runs stay in its directory."""
    return None if config.tracking == LOCAL else config.tracking


def open_tracker(directory: Path, config: StudyConfig) -> Tracker:
    """Returns what writes a study to MLflow.

    Raises:
        UserError: as `Tracker.open`.
    """
    demo = f"dhen-search demo: {config.demo.rows} rows, seed {config.demo.seed}"
    files = [demo] if config.data == (DEMO,) else [_named(name) for name in config.data]
    return Tracker.open(
        directory, server=server_of(config), name_model=trial_name, describe=study_note, files=files
    )


def _named(data: str) -> str:
    return shown_url(data) if is_url(data) else str(Path(data).absolute())


@contextmanager
def registry(bundle: Path, tracking: str | None) -> Iterator[tuple[MlflowClient, str]]:
    """A client of the store where a bundle is to be registered, and its address; its errors become a UserError.

    Raises:
        UserError: where no registry is named, or it does not answer.
    """
    source, given = ("--tracking", tracking) if tracking else (VARIABLE, os.environ.get(VARIABLE))
    beside = bundle.absolute().parent
    directory = Path(given) if given else beside if database(beside).exists() else None
    if directory is not None and database(directory).exists():
        with store_errors(directory):
            yield open_store(directory), store_uri(directory)
    elif given:
        server = check_server(given, source)
        with server_errors(server):
            yield open_server(server), server
    else:
        raise UserError(
            f"{bundle}: name with --tracking where to register the model, a tracking server such as "
            "http://tracking.example:5000 or a run directory such as runs/demo."
        )
