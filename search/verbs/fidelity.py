"""`fidelity`: whether candidates rank on a part of the log as they do on all of it."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dhen.errors import UserError
from search.dataset import log_name
from search.log_config import data_option
from search.verbs.output import PATH, json_option
from trials.runtime.launcher import Launcher

OUTPUT = "search.analysis.fidelity_result:FidelityResult"
"""Where the class of what `--json` prints is: it is imported with torch, and that late."""


@click.command(
    epilog="""\b
Examples:
  dhen-search fidelity --data log.csv
  dhen-search fidelity --data log.csv --space wide --fractions 0.1,0.25 --tau 0.7
  dhen-search fidelity --from runs/mine --json
"""
)
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@data_option()
@click.option("--from", "directory", type=PATH, help="A finished study, whose candidates to take.")
@click.option("--space", help="Where candidates are drawn from (default `default`).")
@click.option("--fractions", help="Of the training rows (default 0.05,0.1,0.25,0.5).")
@click.option("--candidates", help="How many are drawn (default 20).")
@click.option("--seed", help="Of the draw and of trainings (default 0).")
@click.option("--tau", help="Kendall's, that is to be kept (default 0.8).")
@click.option("--out", type=PATH, help="The folder (default runs/fidelity-NAME).")
@json_option("The audit as JSON (search.analysis.fidelity_result).")
def command(
    overrides: tuple[str, ...],
    data: tuple[str, ...],
    directory: Path | None,
    out: Path | None,
    as_json: bool,
    **options: str | None,
) -> None:
    """Measure on your log how well candidates trained on a fraction of it rank as on all of it.

    Candidates are drawn from a space (those that fit), or taken from a finished study, and trained on each
    fraction and on all rows, there from two seeds. The same command goes on after Ctrl-C.

    Keys: cluster, ranks, hbm, parallel, threads, label, demo.rows, training.KEY.
    """
    if not data and directory is None:
        raise UserError("whose log? --data LOG draws candidates, --from DIR takes those of a finished study.")
    launcher = Launcher()
    launcher.warm_up()
    from search.analysis.fidelity import fidelity, studied
    from search.analysis.fidelity_result import (
        key,
        read_fidelity_config,  # torch is imported here and there side by side
        remark,
        table,
        verdict,
    )
    from search.terminal import print_line, resumable

    study = studied(directory) if directory else None
    config = read_fidelity_config(overrides, study.config if study else None, data=data or None, **options)
    name = directory.resolve().name if directory else log_name(data)
    out = out or Path("runs") / f"fidelity-{name}"
    console = Console(stderr=as_json)
    with resumable(console, out):
        result = fidelity(config, out, launcher, console, study=study)
    if as_json:
        click.echo(result.model_dump_json(indent=1))
        return
    console.print(table(result))
    for line in filter(None, (remark(result), verdict(result), key(result))):
        print_line(console, line)
