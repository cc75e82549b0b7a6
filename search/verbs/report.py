"""`report`: writes a study's report anew, or one of two studies."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from dashboards.report.comparison import write_comparison
from dashboards.report.page import write_report
from dashboards.sentences.summary import sentences
from dashboards.terminal.tables import accuracy_table, winners_table
from search.bundles.lost_weights import lost_weights
from search.read_study import read_study
from search.terminal import print_table
from trials.study_record import StudyRecord

COMPARISON = "comparison.html"


@click.command(epilog="Example: dhen-search report runs/demo --open")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help=f"Default: report.html, or {COMPARISON}, in DIRECTORY."
)
@click.option(
    "--compare",
    "other",
    metavar="DIRECTORY2",
    type=click.Path(path_type=Path),
    help="Write a report of two studies: both fronts, the best of each, what differs.",
)
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
def command(directory: Path, out: Path | None, other: Path | None, opens: bool) -> None:
    """Write the report of the study in DIRECTORY: one HTML file that opens anywhere, offline."""
    record = read_study(directory, or_empty=True)
    if other is not None:
        path = out or directory / COMPARISON
        write_comparison(record, read_study(other, or_empty=True), path)
    else:
        path = out or directory / "report.html"
        notes = lost_weights(record)
        write_report(record, path, notes=notes)
        _print(record)
        for note in notes:
            click.echo(f"note: {note}")
    click.echo(f"report: {path}")
    if opens:
        _open(path)


def _print(record: StudyRecord) -> None:
    """What was found, in sentences and tables."""
    for sentence in sentences(record):
        click.echo(sentence)
    table = accuracy_table(record)
    if table is not None:
        click.echo("\npredicted against measured")
        print_table(table)
        click.echo()
    winners = winners_table(record)
    if winners is not None:
        click.echo("winners against the baseline, on test")
        print_table(winners)
        click.echo()


def _open(path: Path) -> None:
    address = path.absolute().as_uri()
    if not webbrowser.open(address):
        click.echo(
            f"no browser could be started here; open {address}, or copy the file to where there is one."
        )
