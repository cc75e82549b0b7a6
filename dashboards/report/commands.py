"""What to run next, as commands that can be copied."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trials.study_record import StudyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and what it is for."""

    purpose: str
    line: str


def next_commands(record: StudyRecord) -> tuple[Command, ...]:
    """Returns what a person runs next, the most useful first."""
    directory = shlex.quote(record.directory)
    if record.best is None or not record.finished:
        way = (
            Command(purpose="See how far it is", line=f"dhen-search status {directory}")
            if record.running and not record.finished
            else Command(purpose="Go on with the study", line=f"dhen-search run --out {directory}")
        )
        return (way, *_export(record, directory)[:1])
    confirm = Command(purpose="Find out whether it is certain", line=f"dhen-search confirm {directory}")
    confirmed = record.comparison(record.best) is not None or record.best == record.baseline
    return (*(() if confirmed else (confirm,)), *_export(record, directory))


def export_line(record: StudyRecord, number: int) -> str:
    """Returns the command that exports the trial with this number."""
    return f"dhen-search export {shlex.quote(record.directory)} --pick {number} --out trial-{number}"


def _export(record: StudyRecord, directory: str) -> tuple[Command, ...]:
    if record.best is None:
        return ()
    return (
        Command(
            purpose="Take the best away", line=f"dhen-search export {directory} --pick best --out winner"
        ),
        Command(
            purpose="Score rows with it",
            line="dhen-search predict winner --data new.csv --out scores.csv",
        ),
    )
