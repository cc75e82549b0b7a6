"""`reproduce`: the DHEN paper's tables on a log of one's own."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from search.dataset import log_name
from search.log_config import data_option
from search.verbs.output import PATH, json_option
from trials.runtime.launcher import Launcher

OUTPUT = "search.analysis.reproduce:TableResult"
"""Where the class of what `--json` prints is: it is imported with torch, and that late."""


@click.command(
    epilog="""\b
Examples:
  dhen-search reproduce table1 --data demo
  dhen-search reproduce table2 --data log.csv --out runs/paper seeds=5
  dhen-search reproduce table3 --data log.csv --json training.batch_size=4096 embedding_dim=32
"""
)
@click.argument("table", metavar="table1|table2|table3")
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@data_option(required=True)
@click.option("--out", type=PATH, help="The folder (default runs/reproduce-NAME).")
@json_option("The table as JSON (search.analysis.reproduce).")
def command(
    table: str, overrides: tuple[str, ...], data: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Train the rows of a table of the DHEN paper on your log: relative NE at milestones, with intervals.

    The same command goes on after Ctrl-C, and trains nothing twice; tables may share a folder.

    \b
    Keys, by what they are about:
      intervals   seeds, seed, confidence, milestones
      rows        layers, embedding_dim, out_embeddings, ensemble, norm_placement, head
      table2, 3   modules, mlp
      table3      experts
      trainings   training.KEY, parallel, threads
      log         format, csv.KEY, label, weight, columns.NAME, schema_file, skip_bad_rows
      rows        split.KEY, growing.KEY, demo.KEY
    """
    launcher = Launcher()
    launcher.warm_up()
    from search.analysis.reproduce import findings, findings_heading, markdown, remarks, reproduce, rich_table
    from search.analysis.reproduce_tables import (
        read_table_config,  # torch is imported here and there side by side
    )
    from search.terminal import print_line, resumable

    config = read_table_config(table, overrides, data)
    directory = out or Path("runs") / f"reproduce-{log_name(data)}"
    console = Console(stderr=as_json)
    with resumable(console, directory):
        result = reproduce(table, config, directory, launcher, console)
    if as_json:
        click.echo(result.model_dump_json(indent=1))
        return
    if not console.is_terminal:  # as in the file: nothing is cut to a width
        click.echo(markdown(result))
        return
    console.print(rich_table(result, console.width))
    for line in (*remarks(result), findings_heading(result), *findings(result)):
        print_line(console, line)
    console.print(f"written: {directory / table}.md, .json, .html", soft_wrap=True)
