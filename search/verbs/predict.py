"""`predict`: scores a file of raw rows with a bundle."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dhen.errors import UserError
from search.bundles.bundle import read_bundle
from search.bundles.scorer import score_rows
from search.dataset import log_files
from search.log_config import data_option, read_options
from search.terminal import step_progress
from search.verbs.output import PATH, ScoredRows, json_option, print_json
from trials.data.prepared_log import PreparedLog

OUTPUT = ScoredRows


@click.command(epilog="Example: dhen-search predict runs/demo/best --data new.csv --out scores.csv")
@click.argument("bundle", type=PATH)
@click.argument("words", nargs=-1, metavar="[csv.KEY=value ...]")
@data_option("Raw rows, files or a folder; no label needed.", required=True)
@click.option("--format", "log_format", help="csv, tsv, parquet, criteo or avazu; found out if not given.")
@click.option("--out", type=PATH, required=True, help="CSV of row,score.")
@json_option("File and rows as JSON.")
def command(
    bundle: Path,
    words: tuple[str, ...],
    data: tuple[str, ...],
    log_format: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Write `row,score` in input order: the probability of a click, corrected for negative sampling.

    Unseen categories and missing values are scored as the encoding learned to.
    """
    opened_bundle, options = read_bundle(bundle), read_options(words, ("csv", "format"), format=log_format)
    if out.is_dir():
        raise UserError(f"{out} is a folder; --out names the CSV file to write.")
    files = log_files(data)
    for path in files:
        if PreparedLog.is_prepared(path):
            raise UserError(f"{path} is a prepared log, whose rows are encoded; name the raw files.")
    with step_progress(Console(stderr=as_json)) as progress:
        rows = score_rows(
            opened_bundle,
            files,
            out,
            options=options,
            on_rows=lambda scored: progress("scoring", scored, None),
        )
    if as_json:
        print_json(ScoredRows(file=str(out), rows=rows))
        return
    click.echo(f"{out}: {rows:,} rows scored")
