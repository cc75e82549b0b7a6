"""The run directory: `study.yaml`, `study.db`, `mlflow.db`, `artifacts/`, `trials/`, `report.html`, `best/`.

One study a directory. The same command finds its `study.yaml` again and goes on. Readers take the study
from its ledger, and what running trials have reached from the events they leave.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dhen.errors import UserError
from dhen.values import load_yaml
from search.execution.reduce_events import absorb, cut_short
from search.study_state import Standing
from trials.events import EVENTS, Evaluated, Event, EventReader, Progress
from trials.record import Outcome, Retraining, StudyRecord, TrialRecord
from trials.storage.database import sqlite_url
from trials.storage.ledger import Ledger

STUDY_FILE, STUDY_DB, LOCK_FILE, TRIALS = "study.yaml", "study.db", ".lock", "trials"
HEAD = "record"
"""Key of the ledger's facts that holds the study's record without its trials."""
LOCK_ATTEMPTS, LOCK_PAUSE_SECONDS = 5, 0.1
"""A reader that asks whether a driver is at work holds the lock for a moment."""


def database_url(directory: Path, storage: str | None) -> str:
    """Of the study's database: `storage`, or the run directory's own."""
    return storage or sqlite_url(directory / STUDY_DB)


def study_name(directory: Path, name: str | None) -> str:
    """Of the study in the run directory: `name`, or the directory's own."""
    return name or directory.resolve().name


def trial_folder(directory: Path, number: int) -> Path:
    """Where a trial's process leaves its events, its log and its weights."""
    return directory / TRIALS / f"{number:05d}"


def read_record(directory: Path) -> StudyRecord:
    """The study as it stands, whether a driver is at work on it or not.

    Raises:
        UserError: where the directory holds no study, or one that has not trained anything yet.
    """
    if not (directory / STUDY_FILE).exists():
        raise UserError(f"{directory}: no study here; `dhen-search run --out {directory}` starts one.")
    running = is_driven(directory)
    ledger = _open_ledger(directory)
    head = (ledger.facts() or {}).get(HEAD)
    trials = [_as_it_is(directory, trial, running=running) for trial in ledger.trials()]
    confirmed = {"retrainings": _retrainings(ledger, running=running), "comparisons": ledger.comparisons()}
    ledger.close()
    if head is None or not trials:
        raise _not_begun(directory)
    changes = {"directory": str(directory), "running": running}
    return Standing(StudyRecord.model_validate(head).replace(**(changes | confirmed)), trials).record()


def read_progress(record: StudyRecord) -> dict[int, Progress]:
    """What the running trials of a study that was read last said of their training, by trial."""
    running = (trial.number for trial in record.trials if trial.outcome is Outcome.RUNNING)
    told = {number: _events(Path(record.directory), number) for number in running}
    progress = {number: [e for e in events if isinstance(e, Progress)] for number, events in told.items()}
    return {number: events[-1] for number, events in progress.items() if events}


def _open_ledger(directory: Path) -> Ledger:
    """For reading alone: nothing is created."""
    config = load_yaml(directory / STUDY_FILE)
    if not isinstance(config, dict):
        raise UserError(f"{directory / STUDY_FILE} is damaged: expected a mapping of keys to values.")
    if config.get("storage") is None and not (directory / STUDY_DB).exists():
        raise _not_begun(directory)
    url = database_url(directory, config.get("storage"))
    return Ledger(url, study_name(directory, config.get("name")), create=False)


def _not_begun(directory: Path) -> UserError:
    return UserError(f"{directory}: the study has not started a trial yet; run its command again.")


def _as_it_is(directory: Path, trial: TrialRecord, *, running: bool) -> TrialRecord:
    """The ledger has a running trial as it began: with the curve so far, or as cut short with its driver."""
    if trial.outcome is not Outcome.RUNNING:
        return trial
    if not running:
        return cut_short(trial)
    for event in _events(directory, trial.number):
        if isinstance(event, Evaluated):
            trial = absorb(trial, event)
    return trial


def _retrainings(ledger: Ledger, *, running: bool) -> tuple[Retraining, ...]:
    return tuple(each if running else cut_short(each) for each in ledger.retrainings())


def _events(directory: Path, number: int) -> list[Event]:
    return EventReader(trial_folder(directory, number) / EVENTS)()


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
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("w") as file:
        for _ in range(LOCK_ATTEMPTS):
            if _lock(file.fileno(), fcntl.LOCK_EX):
                break
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            raise UserError(f"{directory}: another process is running this study; wait for it to end.")
        yield


def is_driven(directory: Path) -> bool:
    """Whether a driver is at work on the study."""
    try:
        with (directory / LOCK_FILE).open() as file:
            return not _lock(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _lock(file: int, how: int) -> bool:
    """Whether the lock was to be had at once; it goes when the file is closed."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
