"""`report`: writes a study's report anew."""

from __future__ import annotations

from pathlib import Path

import click

from dashboards.report.page import write_report
from dashboards.sentences.summary import sentences
from dashboards.terminal.tables import accuracy_table, winners_table
from search.read_study import read_study
from search.terminal import print_table
from search.verbs.output import WrittenReport, json_option, print_json

OUTPUT = WrittenReport


@click.command(epilog="Example: dhen-search report runs/demo --out demo.html")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Default: report.html in DIRECTORY.")
@json_option("Its path and the findings as JSON.")
def command(directory: Path, out: Path | None, as_json: bool) -> None:
    """Write the report of the study in DIRECTORY: one HTML file that opens anywhere, offline."""
    record = read_study(directory)
    path = out or directory / "report.html"
    write_report(record, path)
    if as_json:
        print_json(
            WrittenReport(
                report=str(path), sentences=tuple(sentences(record)), comparisons=record.comparisons
            )
        )
        return
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
    click.echo(f"report: {path}")
