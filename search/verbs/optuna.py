"""`optuna`: writes a study into a storage of Optuna, where Optuna's own tools open it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from search.study.optuna_storage import WrittenStudy
from search.verbs.output import PATH, json_option, print_json

OUTPUT = WrittenStudy


@click.command(
    epilog="""\b
Examples:
  dhen-search optuna runs/demo --storage sqlite:///optuna.db
  optuna-dashboard sqlite:///optuna.db
  dhen-search optuna runs/demo --storage postgresql://me@host/optuna --name demo-july
"""
)
@click.argument("directory", type=PATH)
@click.option(
    "--storage", required=True, help="A SQLAlchemy URL (SQLite, PostgreSQL), or the path of a journal file."
)
@click.option("--name", help="Name of the Optuna study (default: the study's own).")
@json_option("What was written, as JSON.")
def command(directory: Path, storage: str, name: str | None, as_json: bool) -> None:
    """Write the study in DIRECTORY as an Optuna study: parameters, NE and FLOPs, curves, constraints, attributes.

    `optuna.load_study` opens it, `optuna.visualization` draws it, optuna-dashboard shows it. The same command
    brings it up to date; `dhen-search run` does so by itself with optuna=STORAGE. The ledger stays the truth:
    nothing is read back from there.
    """
    from search.read_study import read_study
    from search.study.optuna_mirror import OptunaMirror

    record = read_study(directory)
    with contextlib.closing(OptunaMirror(storage, name=name)) as mirror:
        written = mirror.sync(record)
    if as_json:
        print_json(written)
        return
    click.echo(f"{written.storage}: Optuna study {written.study!r}, {written.trials} trials")
