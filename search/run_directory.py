"""The run directory: where a study's files lie, and the lock that one driver holds.

`study.yaml`, `study.db`, `mlflow.db`, `artifacts/`, `driver.log`, `trials/`, `retrained/`, `teachers/`,
`report.html`, `best/`. One study per directory; the same command finds its `study.yaml` again and goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from dhen.errors import UserError
from trials.record import TrialKind, TrialRecord
from trials.storage.database import sqlite_url

STUDY_FILE, STUDY_DB, LOCK_FILE = "study.yaml", "study.db", ".lock"
DRIVER_LOG, REPORT, BEST = "driver.log", "report.html", "best"
TRIALS, RETRAINED, TEACHERS = "trials", "retrained", "teachers"
CHECKPOINTS = "checkpoints"
"""The folder in a trial's folder from which a training that was cut short goes on."""
DRIVER_WAITS_SECONDS = 0.5
"""Seconds that a driver waits for the lock: a reader that asks for a driver holds it for a moment, too."""
READER_ASKS, READER_PAUSE_SECONDS = 3, 0.01
"""A reader that meets another reader at the lock asks again; only a driver holds it as long as all that."""


def database_url(directory: Path, storage: str | None) -> str:
    """URL of the study's database: `storage`, or the run directory's own."""
    return storage or sqlite_url(directory / STUDY_DB)


def study_name(directory: Path, name: str | None) -> str:
    """Name of the study in the run directory: `name`, or the directory's own."""
    return name or directory.resolve().name


def trial_folder(directory: Path, number: int) -> Path:
    """Folder where the processes of the trial with this number leave their events, their logs and its weights."""
    return directory / TRIALS / f"{number:05d}"


def folder_of(directory: Path, trial: TrialRecord) -> Path:
    """Folder of a trial, of the trial whose result it shares, or of a retraining, which is numbered apart."""
    retraining = trial.kind is TrialKind.RETRAINING
    return trial_folder(directory / RETRAINED if retraining else directory, trial.owner)


@contextmanager
def only_driver(directory: Path) -> Iterator[None]:
    """Holds the run directory for one driver; the lock goes with the process, however it ends.

    Raises:
        UserError: where another process drives this study.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # A soft lock, which is a mere file, would stay when the process is killed.
    lock = FileLock(directory / LOCK_FILE, timeout=DRIVER_WAITS_SECONDS, fallback_to_soft=False)
    try:
        held = lock.acquire()
    except Timeout:
        raise UserError(f"{directory}: another process is running this study; wait for it to end.") from None
    with held:
        yield


def is_driven(directory: Path) -> bool:
    """Whether a driver is at work on the study.

    Nothing is written: the study may be another user's, on a disk for reading alone.
    """
    try:
        with (directory / LOCK_FILE).open() as file:
            for _ in range(READER_ASKS):
                if lock_descriptor(file.fileno(), blocking=False):
                    return False  # the lock goes when the file is closed
                time.sleep(READER_PAUSE_SECONDS)
    except FileNotFoundError:
        return False
    return True
