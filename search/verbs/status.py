"""`status`: what a study has found so far."""

from __future__ import annotations

from pathlib import Path

import click
from pydantic import TypeAdapter
from rich.console import Console

from dashboards.sentences.summary import sentences
from dashboards.terminal.tables import trial_table
from search.read_study import read_progress, read_study
from search.terminal import progress_lines
from search.verbs.output import PATH, json_option
from trials.records.study_record import StudyRecord
from trials.store.garbage import no_garbage_collection

OUTPUT = StudyRecord
ROWS = 50
"""Largest number of rows of the table; the report and --json have every trial."""


@click.command(epilog="Example: dhen-search status runs/demo --json")
@click.argument("directory", type=PATH)
@json_option("The study's whole record as JSON (trials.records.study_record.StudyRecord).")
def command(directory: Path, as_json: bool) -> None:
    """The study in DIRECTORY: its trials, its front, its best against the baseline, what runs now."""
    with no_garbage_collection():
        # in a function of its own: what it made is gone before garbage is looked for again
        _show(directory, as_json=as_json)


def _show(directory: Path, *, as_json: bool) -> None:
    record = read_study(directory, brief=not as_json)
    if as_json:
        # as bytes: a text of a hundred megabytes would be encoded once more
        click.echo(TypeAdapter(StudyRecord).dump_json(record, indent=1))
        return
    console = Console()
    console.print(trial_table(record, rows=ROWS))
    trials, retrainings = (read_progress(some, directory) for some in (record.trials, record.retrainings))
    for line in progress_lines(record, trials, retrainings):
        console.print(line, soft_wrap=True)
    for sentence in sentences(record):
        console.print(sentence, soft_wrap=True, markup=False)
