"""Reads a study from its run directory: from its ledger, and what running trials have reached from their
events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dhen.errors import UserError
from dhen.values import load_yaml
from search.execution.reduce_events import cut_short, reduce_event
from search.run_directory import (
    BEST,
    LOCK_FILE,
    REPORT,
    STUDY_FILE,
    database_url,
    folder_of,
    has_database,
    has_results,
    is_driven,
    study_name,
    trial_folder,
)
from search.study_state import StudyState
from trials.records.events import EVENTS, EvaluationEvent, EventReader, Progress
from trials.records.study_record import LogSummary, StudyRecord
from trials.records.trial_record import Outcome, TrialRecord
from trials.store.database import same_database, sqlite_file
from trials.store.ledger import Ledger, StoredStudy, Studies

HEAD = "record"
"""Key of the ledger's facts that holds the study's record without its trials."""
NOTED_AT = "noted_at"
"""Key of the moment when that was noted, in seconds since 1970: a running study's time has gone on since."""


def read_study(directory: Path, *, brief: bool = False, or_empty: bool = False) -> StudyRecord:
    """The study as it stands, whether a driver is at work on it or not.

    Args:
        directory: the study's run directory.
        brief: without what only a close look at one candidate shows (`trials.store.schema`), which is faster.
        or_empty: whether a study that has not trained anything is read too, as a record without trials.

    Raises:
        UserError: if the directory holds no study, or one that has not trained anything yet, but with
            `or_empty`.
    """
    running = is_driven(directory)
    if (
        or_empty
        and (directory / STUDY_FILE).exists()
        and not (_has_ledger(directory) or has_results(directory))
    ):
        return _empty(directory, running=running)
    url, name = ledger_of(directory)
    return _read(url, name, directory, running=running, brief=brief, or_empty=or_empty)


def read_stored_study(url: str, name: str, directory: Path | None) -> StudyRecord:
    """The study of this name in a database, wherever its driver runs.

    Whether a driver is at work is only seen in the run directory; a study that is not finished counts as one that
    is driven where that directory is elsewhere.

    Args:
        url: the database.
        name: the study's name there.
        directory: the study's run directory, if it is on this machine.

    Raises:
        UserError: if the database has no such study, or one that has not trained anything yet.
    """
    running = None if directory is None else is_driven(directory)
    return _read(url, name, directory, running=running, brief=False)


def ledger_of(directory: Path) -> tuple[str, str]:
    """The database of the study in a run directory, and the study's name there.

    Raises:
        UserError: if the directory holds no study, or one that has not trained anything yet.
    """
    if not (directory / STUDY_FILE).exists():
        if is_driven(directory):
            raise UserError(f"{directory}: a study begins here; it has not started a trial yet.")
        raise UserError(f"{directory}: no study here; `dhen-search run --out {directory}` starts one.")
    if not _has_ledger(directory):
        raise not_begun(directory)
    config = _config(directory)
    return database_url(directory, config.get("storage")), study_name(directory, config.get("name"))


def stored_studies(database: str, name: str | None) -> tuple[StoredStudy, ...]:
    """The studies of a database: the one that is named, or all.

    Raises:
        UserError: if the database cannot be read, has no study, or none of that name.
    """
    opened = Studies(database)
    try:
        there = opened.all()
    finally:
        opened.close()
    wanted = tuple(study for study in there if name in (None, study.name))
    if not there:
        raise UserError(
            "the database holds no study that has trained anything; `dhen-search run storage=URL` begins one."
        )
    if not wanted:
        names = ", ".join(study.name for study in there)
        raise UserError(f"the database holds no study {name!r}; it has {names}.")
    return wanted


def run_directory_of(database: str, study: StoredStudy) -> Path | None:
    """The study's run directory, if it is on this machine: another study may lie at its path here."""
    file = sqlite_file(database)
    beside = file.parent if file is not None else None  # that it was begun in may have been renamed since
    for directory in (beside, Path(study.directory) if study.directory else None):
        with suppress(UserError, OSError):
            if directory is not None:
                url, name = ledger_of(directory)
                if name == study.name and same_database(url, database):
                    return directory
    return None


def read_finished_study(directory: Path) -> StudyRecord:
    """The study in a run directory, whose selection is frozen.

    Raises:
        UserError: if there is no study, or it is not finished.
    """
    record = read_study(directory)
    if not record.finished:
        raise UserError(
            f"{directory}: the study is not finished, and winners are compared when selection is frozen; "
            f"`dhen-search run --out {directory}` goes on, trials= and minutes= say how far."
        )
    return record


def read_progress(trials: Iterable[TrialRecord], directory: Path) -> dict[int, Progress]:
    """The last progress that each running one of a study's trials, or of its retrainings, has reported, by
    number."""
    progress: dict[int, Progress] = {}
    for trial in trials:
        if trial.result.outcome is Outcome.RUNNING:
            events = EventReader(folder_of(directory, trial) / EVENTS)()
            said = [event for event in events if isinstance(event, Progress)]
            progress |= {trial.number: said[-1]} if said else {}
    return progress


def _read(
    url: str, name: str, directory: Path | None, *, running: bool | None, brief: bool, or_empty: bool = False
) -> StudyRecord:
    """The study in a database; its running trials go on if `running`, or if that is not known (None) and the
    study is not finished."""
    with closing(Ledger(url, name, create=False)) as ledger:  # for reading alone: nothing is created
        facts = ledger.facts() or {}
        head, trials = facts.get(HEAD), ledger.trials(brief=brief)
        if head is None or (not trials and not or_empty):
            raise not_begun(directory or name)
        with ledger.database.record_errors():
            record = StudyRecord.model_validate(head).replace(
                created_at=facts.get("created"),
                comparisons=ledger.comparisons(),
                ablations=ledger.ablations(),
                slices=ledger.slices(),
            )
            noted_at = float(facts.get(NOTED_AT, math.inf))
        retrainings = ledger.retrainings()
    running = not record.finished if running is None else running
    record = record.replace(running=running)
    if (
        running
    ):  # the ledger has a trial as it began: its curve so far is in the run directory, if that is here
        for index, trial in enumerate(trials):
            if trial.result.outcome is Outcome.RUNNING and directory:
                for event in EventReader(trial_folder(directory, trial.number) / EVENTS)():
                    if isinstance(event, EvaluationEvent):
                        trials[index] = reduce_event(trials[index], event)
    else:  # cut short with its driver
        trials = list(map(cut_short, trials))
    retrainings = [trial if running else cut_short(trial) for trial in retrainings]
    if directory is not None:
        record = record.replace(directory=str(directory))
    if not running or record.finished:
        noted_at = math.inf
    elif directory is not None:
        with suppress(FileNotFoundError):
            # the newest driver took its lock later: an earlier one noted this, and it has not yet
            if noted_at < (directory / LOCK_FILE).stat().st_mtime:
                noted_at = math.inf
    since = max(0.0, time.time() - noted_at)
    study = StudyState(record, trials, retrainings).record()
    return study.replace(elapsed_seconds=max(study.elapsed_seconds, record.elapsed_seconds + since))


def _has_ledger(directory: Path) -> bool:
    """Whether the study in a run directory has a database by now."""
    return _config(directory).get("storage") is not None or has_database(directory)


def _config(directory: Path) -> dict[str, Any]:
    """The study's settings as its file has them."""
    config = load_yaml(directory / STUDY_FILE)
    if not isinstance(config, dict):
        raise UserError(f"{directory / STUDY_FILE} is damaged: expected a mapping of keys to values.")
    return config


def _empty(directory: Path, *, running: bool) -> StudyRecord:
    """The record of a study whose ledger knows nothing yet, from its settings alone."""
    config = _config(directory)
    name, data, seed = config.get("name"), config.get("data"), config.get("seed")
    words = data if isinstance(data, list) else [data]
    log = LogSummary(
        name=" ".join(str(word) for word in words if word) or "not known yet",
        fingerprint="",
        rows={},
        base_rate={},
        tables=0,
        numeric=0,
    )
    return StudyRecord(
        name=study_name(directory, str(name) if name else None),
        directory=str(directory),
        space=str(config.get("space")),
        sampler=str(config.get("sampler")),
        seed=seed if isinstance(seed, int) else 0,
        log=log,
        trials=(),
        running=running,
    )


def not_begun(what: Path | str) -> UserError:
    """Returns the error for a study without trials in its database: new, or its database was lost.

    Args:
        what: the run directory, or the study's name.
    """
    if not isinstance(what, Path) or not has_results(what):
        return UserError(f"{what}: the study has not started a trial yet; run its command again.")
    best = what / BEST
    saved = f" {best} still works: `dhen-search predict {best}`, serve, export." if best.exists() else ""
    if (what / REPORT).exists():
        saved += f" {what / REPORT} still shows the trials."
    return UserError(
        f"{what}: trials were trained here, and the study's database with their results is lost or empty. Put it "
        f"back from a copy (study.db, or what storage= names), or begin a new study with another --out.{saved}"
    )
