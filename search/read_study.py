"""Reads a study from its run directory: from its ledger, and what running trials have reached from their
events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dhen.errors import UserError
from dhen.values import load_yaml
from search.execution.reduce_events import cut_short, reduce_event
from search.run_directory import (
    STUDY_DB,
    STUDY_FILE,
    database_url,
    folder_of,
    is_driven,
    study_name,
    trial_folder,
)
from search.study_state import StudyState
from trials.events import EVENTS, Evaluated, Event, EventReader, Progress
from trials.record import Outcome, TrialRecord
from trials.storage.ledger import Ledger
from trials.study_record import LogSummary, StudyRecord

HEAD = "record"
"""Key of the ledger's facts that holds the study's record without its trials."""
NOTED_AT = "noted_at"
"""Key of the moment when that was noted, in seconds since 1970: a running study's time has gone on since."""


def read_study(directory: Path, *, brief: bool = False, or_empty: bool = False) -> StudyRecord:
    """The study as it stands, whether a driver is at work on it or not.

    Args:
        directory: the study's run directory.
        brief: without what only a close look at one candidate shows (`trials.storage.columns`), which is faster.
        or_empty: whether a study that has not trained anything is read too, as a record without trials.

    Raises:
        UserError: where the directory holds no study, or one that has not trained anything yet, but with
            `or_empty`.
    """
    if not (directory / STUDY_FILE).exists():
        raise UserError(f"{directory}: no study here; `dhen-search run --out {directory}` starts one.")
    running = is_driven(directory)
    ledger = _open_ledger(directory)
    if ledger is None:
        if or_empty:
            return _empty(directory, running=running)
        raise _not_begun(directory)
    facts = ledger.facts() or {}
    head = facts.get(HEAD)
    trials = [_as_it_is(directory, trial, running=running) for trial in ledger.trials(brief=brief)]
    retrainings = [trial if running else cut_short(trial) for trial in ledger.retrainings()]
    comparisons = ledger.comparisons()
    ablations, slices = ledger.analyses.ablations(), ledger.analyses.slices()
    ledger.close()
    if head is None or (not trials and not or_empty):
        raise _not_begun(directory)
    record = StudyRecord.model_validate(head).replace(
        directory=str(directory),
        created_at=facts.get("created"),
        running=running,
        comparisons=comparisons,
        ablations=ablations,
        slices=slices,
    )
    noted_at = facts.get(NOTED_AT, math.inf) if running else math.inf
    since = max(0.0, time.time() - noted_at)
    study = StudyState(record, trials, retrainings).record()
    return study.replace(elapsed_seconds=max(study.elapsed_seconds, record.elapsed_seconds + since))


def read_finished_study(directory: Path) -> StudyRecord:
    """The study in a run directory, whose selection is frozen.

    Raises:
        UserError: where there is no study, or it is not finished.
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


def _open_ledger(directory: Path) -> Ledger | None:
    """Opens the ledger for reading alone: nothing is created. None where there is none."""
    config = _config(directory)
    if config.get("storage") is None and not (directory / STUDY_DB).exists():
        return None
    url = database_url(directory, config.get("storage"))
    return Ledger(url, study_name(directory, config.get("name")), create=False)


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


def _not_begun(directory: Path) -> UserError:
    return UserError(f"{directory}: the study has not started a trial yet; run its command again.")


def _as_it_is(directory: Path, trial: TrialRecord, *, running: bool) -> TrialRecord:
    """A trial of the ledger, which has it as it began: with the curve so far, or cut short with its driver."""
    if trial.result.outcome is not Outcome.RUNNING:
        return trial
    if not running:
        return cut_short(trial)
    for event in _events(directory, trial.number):
        if isinstance(event, Evaluated):
            trial = reduce_event(trial, event)
    return trial


def _events(directory: Path, number: int) -> list[Event]:
    return EventReader(trial_folder(directory, number) / EVENTS)()
