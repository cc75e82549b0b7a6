"""`report`: writes a study's report anew."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dashboards.report.page import write_report
from dashboards.sentences.summary import sentences
from dashboards.terminal.tables import accuracy_table, winners_table
from dhen.values import load_yaml
from search.read_study import read_study
from search.run_directory import STUDY_FILE
from search.terminal import print_table
from search.verbs.output import WrittenReport, json_option, print_json
from trials.study_record import StudyRecord

OUTPUT = WrittenReport


@click.command(epilog="Example: dhen-search report runs/demo --out demo.html")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Default: report.html in DIRECTORY.")
@json_option("Its path and the findings as JSON.")
def command(directory: Path, out: Path | None, as_json: bool) -> None:
    """Write the report of the study in DIRECTORY: one HTML file that opens anywhere, offline.

    A study whose runs go to a tracking server (tracking=) is brought up to date there, too.
    """
    record = read_study(directory)
    path = out or directory / "report.html"
    write_report(record, path)
    _catch_up(directory, record, json_on_stdout=as_json)
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


def _catch_up(directory: Path, record: StudyRecord, *, json_on_stdout: bool) -> None:
    """Writes to the study's tracking server what it has missed; its driver does so while there is one."""
    if load_yaml(directory / STUDY_FILE).get("tracking") is None or record.running:
        return
    from search.config import written_config  # late: with torch, which a report needs for nothing else
    from search.tracking.destination import server_of
    from search.tracking.follower import MlflowFollower

    config = written_config(directory)
    server = server_of(config)
    mlflow = MlflowFollower(directory, config, Console(stderr=True))
    if server is not None and mlflow.sync(record):
        mlflow.register_best(record)
        click.echo(f"MLflow: {server} is up to date", err=json_on_stdout)
