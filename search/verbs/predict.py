"""`predict`: scores a file of raw rows with a bundle."""

from __future__ import annotations

import csv
from pathlib import Path

import click
import torch
from rich.console import Console

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from search.bundles.bundle import read_bundle
from search.dataset import log_files
from search.terminal import step_progress
from search.verbs.data_option import files_first
from trials.cluster.machine import device
from trials.data.encoding.encode_rows import encode_rows
from trials.data.loader import feature_batch
from trials.metrics import undo_negative_sampling

BATCH_ROWS = 8192


@click.command(epilog="Example: dhen-search predict runs/demo/best --data new.csv --out scores.csv")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--data",
    multiple=True,
    callback=files_first,
    required=True,
    help="Raw rows, files or a folder; no label needed.",
)
@click.option("--format", "log_format", help="csv, tsv, parquet, criteo or avazu; found out if not given.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="CSV of row,score.")
def command(bundle: Path, data: tuple[str, ...], log_format: str | None, out: Path) -> None:
    """Write `row,score` in input order: the probability of a click, corrected for negative sampling.

    Unseen categories and missing values are scored as the encoding learned to.
    """
    found = read_bundle(bundle)
    if out.is_dir():
        raise UserError(f"{out} is a folder; --out names the CSV file to write.")
    files = log_files(data)
    model = found.model().to(device())
    rate, row = found.info.negative_sampling_rate, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_file(out) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
        step_progress(Console()) as progress,
    ):
        writer = csv.writer(file)
        writer.writerow(("row", "score"))
        for rows in encode_rows(files, found.encoding, format=log_format, batch_size=BATCH_ROWS):
            with torch.no_grad():
                p = torch.sigmoid(model(feature_batch(rows).to(device())).double()).cpu().numpy()
            scores = undo_negative_sampling(p, rate)
            writer.writerows((row + i, f"{score:.9g}") for i, score in enumerate(scores))
            row += len(scores)
            progress("scoring", row, None)
    click.echo(f"{out}: {row:,} rows scored")
