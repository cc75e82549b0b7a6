"""The run directory: where a study's files lie, and the lock that its driver holds, or its drivers share.

`study.yaml`, `study.db`, `mlflow.db`, `artifacts/`, `driver.log`, `trials/`, `retrained/`, `teachers/`,
`report.html`, `best/`. One study per directory; the same command finds its `study.yaml` again and goes on.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from filelock import lock_descriptor

from dhen.errors import UserError
from dhen.values import fingerprint
from trials.records.trial_record import TrialKind, TrialRecord
from trials.store.database import sqlite_file, sqlite_url
from trials.store.ledger import Studies

STUDY_FILE, STUDY_DB, LOCK_FILE = "study.yaml", "study.db", ".lock"
DRIVER_LOG, REPORT, BEST = "driver.log", "report.html", "best"
TRIALS, RETRAINED, TEACHERS = "trials", "retrained", "teachers"
CHECKPOINTS = "checkpoints"
"""The folder in a trial's folder from which a training that was cut short goes on."""
DRIVER_WAITS_SECONDS = 0.5
"""Seconds that a driver waits for the lock: a reader that asks for a driver holds it for a moment, too."""
READER_ASKS, READER_PAUSE_SECONDS = 3, 0.01
"""A reader that meets another reader at the lock asks again; only a driver holds it as long as all that."""

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"}
    | {"sshfs", "s3fs", "rclone", "gcsfuse", "blobfuse2"}
)
"""Types of file systems, without `fuse.` before them, on which the locks that SQLite relies on may fail."""


def network_file_system(path: Path, mounts: str) -> str | None:
    """Returns the type of the network file system that has a path; None on a local disk.

    Args:
        path: a file or a folder, which need not be there.
        mounts: the text of /proc/mounts.
    """
    types = {}
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        types[re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point)] = kind  # \040 is a space
    parents = map(str, (path.resolve(), *path.resolve().parents))
    kind = next((types[folder] for folder in parents if folder in types), "")
    return kind if kind.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS else None


def database_url(directory: Path, storage: str | None) -> str:
    """URL of the study's database: `storage`, or the run directory's own."""
    return storage or sqlite_url(directory / STUDY_DB)


def study_name(directory: Path, name: str | None) -> str:
    """Name of the study in the run directory: `name`; else that of the one study in the directory's own database,
    which stays when the directory is renamed; else the directory's own.

    Raises:
        UserError: if that database cannot be read.
    """
    if name is None and has_database(directory):
        with closing(Studies(database_url(directory, None))) as studies:
            names = studies.names()
        name = names[0] if len(names) == 1 else None
    return name or directory.resolve().name


def has_database(directory: Path) -> bool:
    """Tells whether the run directory has a database of its own. SQLite takes an empty file for a new one."""
    file = directory / STUDY_DB
    return file.exists() and file.stat().st_size > 0


def has_results(directory: Path) -> bool:
    """Tells whether trials were trained in the run directory: their database knows them before their folders are
    made."""
    return (directory / BEST).exists() or any((directory / TRIALS).glob("*"))


def trial_folder(directory: Path, number: int) -> Path:
    """Folder where the processes of the trial with this number leave their events, their logs and its weights."""
    return directory / TRIALS / f"{number:05d}"


def folder_of(directory: Path, trial: TrialRecord) -> Path:
    """Folder of a trial, of the trial whose result it shares, or of a retraining, which is numbered apart."""
    retraining = trial.kind is TrialKind.RETRAINING
    return trial_folder(directory / RETRAINED if retraining else directory, trial.owner)


@contextmanager
def only_driver(directory: Path, *, shared: bool = False, joins: bool = False) -> Iterator[None]:
    """Holds the run directory for one driver; the lock goes with the process, however it ends.

    Args:
        directory: the run directory; it is made if missing.
        shared: whether further drivers may join this one.
        joins: whether this is such a further driver.

    Raises:
        UserError: if another process drives this study, and this one may not join it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    further = " or join it with `dhen-search worker --study URL`" if shared and not joins else ""
    refusal = f"{directory}: another process is running this study; wait for it to end{further}."
    with _held(directory / LOCK_FILE, fcntl.LOCK_SH if joins else fcntl.LOCK_EX, refusal) as file:
        if shared and not joins:  # a first driver of several was alone for a moment
            _locked(file, fcntl.LOCK_SH)
        yield


@contextmanager
def only_writer(storage: str | None, study: str) -> Iterator[None]:
    """Holds a study of a SQLite database that `storage` names, which another run directory may name too.

    Raises:
        UserError: if another process drives the study there.
    """
    path = sqlite_file(storage) if storage is not None else None
    if path is None or not path.parent.is_dir():
        yield  # of a server, or nowhere, which opening it will say
        return
    refusal = (
        f"{path}: another process is running study {study!r} of this database, and SQLite takes one driver; "
        "wait for it to end, or give another name= or storage=."
    )
    with _held(path.with_name(f".{path.name}.{fingerprint(study)[:8]}{LOCK_FILE}"), fcntl.LOCK_EX, refusal):
        yield


@contextmanager
def _held(lock: Path, kind: int, refusal: str) -> Iterator[int]:
    """Holds a lock file, and yields its descriptor; raises UserError with `refusal` if it cannot be had."""
    with lock.open("w") as file:
        deadline = time.monotonic() + DRIVER_WAITS_SECONDS
        while not _locked(file.fileno(), kind):
            if time.monotonic() > deadline:
                raise UserError(refusal)
            time.sleep(READER_PAUSE_SECONDS)
        yield file.fileno()


def _locked(file: int, kind: int) -> bool:
    """Whether a lock of this kind could be had on an open file; it goes when the file is closed."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
