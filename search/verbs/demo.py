"""`demo`: a generated click log in a file of one's own, to try things on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dhen.errors import UserError
from dhen.values import parse
from search.log_config import DemoConfig, set_override
from search.terminal import step_progress
from search.verbs.output import GeneratedLog, json_option, print_json
from trials.data.demo.generate import DELIMITERS, generate

OUTPUT = GeneratedLog


@click.command(
    epilog="""\b
Examples:
  dhen-search demo --out log.csv rows=20000
  dhen-search demo --out visits.csv.gz users=5000 items=500 affinity=0.6
  dhen-search demo --out rare.parquet rows=1000000 users=1000000
  dhen-search demo --out drift.csv users=2000 items=500 affinity=0.5 lifetime_days=3
"""
)
@click.argument("words", nargs=-1, metavar="[key=value ...]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="A file whose name ends in .csv, .tsv (either with .gz) or .parquet.",
)
@json_option("File and rows as JSON.")
def command(words: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Write the built-in generated log, or one with other settings, to a file. Keys: those below `demo` in a
    study, such as rows, seed, users, items.
    """
    data: dict[str, Any] = {}
    for word in words:
        set_override(data, word.removeprefix("demo."))
    spec = parse(DemoConfig, data, "demo")
    if not out.name.endswith((".parquet", *DELIMITERS)):
        raise UserError(
            f"{out}: the name ends in no format that is written; end it in .parquet, {', '.join(DELIMITERS)}."
        )
    console = Console(stderr=as_json)
    with step_progress(console) as progress:
        generate(spec, out, progress=progress)
    if as_json:
        print_json(GeneratedLog(file=str(out), rows=spec.rows))
        return
    console.print(f"{spec.rows:,} generated rows: {out}", soft_wrap=True)
