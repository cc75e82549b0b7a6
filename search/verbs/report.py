"""`report`: writes a study's report anew, or one of two studies."""

from __future__ import annotations

import webbrowser
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from dashboards.plans import accuracy_table
from dashboards.report.comparison import render_comparison
from dashboards.report.page import write_page, write_report
from dashboards.sentences.summary import sentences
from dashboards.sentences.winners import winners_table
from dashboards.terminal.tables import plain_table
from dhen.values import load_yaml
from search.mlflow.fill_in import StudyRuns, is_behind
from search.mlflow.store import LOCAL, database, server_of
from search.read_study import read_study
from search.run_directory import REPORT, STUDY_FILE
from search.terminal import print_table
from search.verbs.output import PATH, WrittenReport, json_option, print_json
from trials.records.study_record import StudyRecord

OUTPUT = WrittenReport
COMPARISON = "comparison.html"


@click.command(epilog="Example: dhen-search report runs/demo --open")
@click.argument("directory", type=PATH)
@click.option("--out", type=PATH, help=f"Default: report.html, or {COMPARISON}, in DIRECTORY.")
@click.option(
    "--compare",
    "other",
    metavar="DIRECTORY2",
    type=PATH,
    help="Write a report of two studies: both fronts, the best of each, what differs.",
)
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@json_option("Its path and the findings as JSON.")
def command(directory: Path, out: Path | None, other: Path | None, opens: bool, as_json: bool) -> None:
    """Write the report of the study in DIRECTORY: one HTML file that opens anywhere, offline.

    If MLflow is behind, it is brought up to date, too: the study's tracking server (tracking=), or the store in
    DIRECTORY.
    """
    record = read_study(directory, or_empty=True)
    notes: tuple[str, ...] = ()
    if other is not None:
        path = out or directory / COMPARISON
        write_page(path, partial(render_comparison, record, read_study(other, or_empty=True)))
    else:
        path = out or directory / REPORT
        from search.bundles.export import lost_weights

        notes = lost_weights(record)
        write_report(record, path, notes=notes)
    if as_json:
        findings = (*sentences(record), *notes)
        print_json(WrittenReport(report=str(path), sentences=findings, comparisons=record.comparisons))
    else:
        if other is None:
            _print(record, notes)
        click.echo(f"report: {path}")
    _catch_up(directory, record, json_on_stdout=as_json)
    address = path.absolute().as_uri()
    if opens and not webbrowser.open(address):
        said = f"no browser could be started here; open {address}, or copy the file to where there is one."
        click.echo(said, err=True)


def _print(record: StudyRecord, notes: tuple[str, ...]) -> None:
    """What was found, in sentences and tables."""
    for sentence in sentences(record):
        click.echo(sentence)
    measured, winners = accuracy_table(record), winners_table(record)
    if measured.rows:
        click.echo("\npredicted against measured")
        print_table(plain_table(*measured))
        click.echo()
    if winners.rows:
        click.echo("winners against the baseline, on test")
        print_table(plain_table(*winners))
        click.echo()
    for note in notes:
        click.echo(f"note: {note}")


def _catch_up(directory: Path, record: StudyRecord, *, json_on_stdout: bool) -> None:
    """Writes to MLflow what it has missed, on the study's tracking server or in the directory's own store; the
    study's driver does so while there is one."""
    runs_go_to = load_yaml(directory / STUDY_FILE).get("tracking")
    own = runs_go_to in (None, LOCAL)
    if record.running or not record.trials or (own and not is_behind(directory, record)):
        return
    from search.config import written_config  # late: with torch, which a report needs for nothing else

    config = written_config(directory)
    server = server_of(config)
    runs = StudyRuns(directory, config, Console(stderr=json_on_stdout))
    if runs.follow(record):
        runs.register_best(record)
        click.echo(f"MLflow: {server or database(directory)} is up to date", err=json_on_stdout)
