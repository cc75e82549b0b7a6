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
from trials.study_record import StudyRecord


@click.command(epilog="Example: dhen-search report runs/demo --out demo.html")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Default: report.html in DIRECTORY.")
def command(directory: Path, out: Path | None) -> None:
    """Write the report of the study in DIRECTORY: one HTML file that opens anywhere, offline.

    A study whose runs go to a tracking server (tracking=) is brought up to date there, too.
    """
    record = read_study(directory)
    path = out or directory / "report.html"
    write_report(record, path)
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
    _catch_up(directory, record)


def _catch_up(directory: Path, record: StudyRecord) -> None:
    """Writes to the study's tracking server what it has missed; its driver does so while there is one."""
    if load_yaml(directory / STUDY_FILE).get("tracking") is None or record.running:
        return
    from search.config import written_config  # late: with torch, which a report needs for nothing else
    from search.tracking.destination import server_of
    from search.tracking.follower import MlflowFollower

    config = written_config(directory)
    server = server_of(config)
    mlflow = MlflowFollower(directory, config, Console())
    if server is not None and mlflow.sync(record):
        mlflow.register_best(record)
        click.echo(f"MLflow: {server} is up to date")
