"""Where a study's runs go: the MLflow store of its run directory, or a tracking server."""

from __future__ import annotations

import os
from pathlib import Path

from dashboards.names import trial_name
from dashboards.sentences.study_note import study_note
from search.config import DEMO, StudyConfig
from trials.mlflow.server import VARIABLE, check_server
from trials.mlflow.tracker import Tracker

LOCAL = "local"
"""Value of `tracking` by which runs stay in the run directory, whatever the environment says."""


def with_destination(config: StudyConfig) -> StudyConfig:
    """Returns settings that say where runs go: as they say themselves, else as the environment does.

    Raises:
        UserError: where that is no address of a tracking server, or holds a password.
    """
    source, given = ("tracking", config.tracking) if config.tracking else (VARIABLE, os.environ.get(VARIABLE))
    if not given or given == LOCAL:
        return config
    return config.replace(tracking=check_server(given, source))


def server_of(config: StudyConfig) -> str | None:
    """Returns the address of the tracking server of a study; None where runs stay in its directory."""
    return None if config.tracking == LOCAL else config.tracking


def open_tracker(directory: Path, config: StudyConfig) -> Tracker:
    """Returns what writes a study to MLflow.

    Raises:
        UserError: as `Tracker.open`.
    """
    demo = f"dhen-search demo: {config.demo.rows} rows, seed {config.demo.seed}"
    files = [demo] if config.data == (DEMO,) else [str(Path(name).absolute()) for name in config.data]
    return Tracker.open(
        directory, server=server_of(config), name_model=trial_name, describe=study_note, files=files
    )
