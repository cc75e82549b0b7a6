"""The run directory: `study.yaml`, `study.db`, `mlflow.db`, `artifacts/`, `trials/`, `report.html`, `best/`.

One study a directory. The same command finds its `study.yaml` again and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dhen.errors import UserError
from trials.record import StudyRecord

STUDY_FILE, STUDY_DB, RECORD_FILE, LOCK_FILE = "study.yaml", "study.db", "study.json", ".lock"


def write_record(directory: Path, record: StudyRecord) -> None:
    """The record beside the ledger, for readers that need no database."""
    write_atomically(directory / RECORD_FILE, record.model_dump_json())


def read_record(directory: Path) -> StudyRecord:
    """The study's record as last published.

    Raises:
        UserError: where the directory holds no study, or one that has not trained anything yet.
    """
    path = directory / RECORD_FILE
    if not (directory / STUDY_FILE).exists():
        raise UserError(f"{directory}: no study here; `dhen-search run --out {directory}` starts one.")
    if not path.exists():
        raise UserError(f"{directory}: the study has not finished a trial yet; run its command again.")
    try:
        record = StudyRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path} is damaged; run the study's command again to write it anew.") from None
    return record.model_copy(update={"directory": str(directory)})


def write_atomically(path: Path, text: str) -> None:
    """A file that is whole, the old one or the new one, at any moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def only_driver(directory: Path) -> Iterator[None]:
    """Holds the run directory for one driver; the lock goes with the process, however it ends.

    Raises:
        UserError: where another process drives this study.
    """
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: another process is running this study; wait for it to end."
            ) from None
        yield
