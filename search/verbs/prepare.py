"""`prepare`: from a click log to a columnar cache and a schema to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from search.config import read_options
from search.dataset import log_files
from search.terminal import print_notes, step_progress
from search.verbs.output import PreparedSummary, json_option, print_json
from trials.data.prepare.prepare_log import prepare
from trials.data.read_options import ReadOptions
from trials.data.schema_yaml import read_schema

OUTPUT = PreparedSummary


@click.command(
    epilog="""\b
Examples:
  dhen-search prepare log.csv.gz --out prepared
  dhen-search prepare log.csv.gz --schema prepared/schema.yaml --out prepared2
  dhen-search prepare log.csv csv.header=no label=c9
"""
)
@click.argument("sources", nargs=-1, required=True, metavar="LOG ... [key=value ...]")
@click.option("--format", "log_format", help="csv, tsv, parquet, criteo or avazu; found out if not given.")
@click.option("--out", type=click.Path(path_type=Path), help="The prepared log's folder (default: a cache).")
@click.option("--schema", type=click.Path(path_type=Path), help="A schema.yaml that you edited.")
@click.option("--label", help="The label column.")
@click.option("--skip-bad-rows", is_flag=True, help="Leave out rows that cannot be read, and count them.")
@json_option("What was prepared, as JSON.")
def command(
    sources: tuple[str, ...],
    log_format: str | None,
    out: Path | None,
    schema: Path | None,
    label: str | None,
    skip_bad_rows: bool,
    as_json: bool,
) -> None:
    """Prepare LOG (files, a folder or a URL) once; studies, trainings and verifications reuse it.

    Keys: label, format, csv.KEY, split.KEY, growing.KEY, skip_bad_rows.
    """
    console = Console(stderr=as_json)
    words = [word for word in sources if _is_key(word)]
    given: dict[str, Any] = {"format": log_format, "label": label, "skip_bad_rows": skip_bad_rows or None}
    with step_progress(console) as progress:
        log = prepare(
            log_files([source for source in sources if source not in words], progress=progress),
            out=out,
            options=read_options(words, **given),
            schema=read_schema(schema) if schema else None,
            progress=progress,
        )
    summary = log.summary()
    if as_json:
        print_json(
            PreparedSummary(
                directory=str(log.directory),
                fingerprint=log.fingerprint,
                rows=summary.rows,
                base_rate=summary.base_rate,
                tables=summary.tables,
                table_rows=log.features.total_rows,
                numeric=summary.numeric,
                notes=tuple(log.notes),
            )
        )
        return
    for split, rows in summary.rows.items():
        console.print(f"{split}: {rows:,} rows, {summary.base_rate[split]:.2%} positive")
    bucketed = len(log.features.bucketed)
    of_numbers = f", {bucketed} of them of numbers' buckets" if bucketed else ""
    console.print(
        f"{summary.tables} embedding tables ({log.features.total_rows:,} rows{of_numbers}), "
        f"{summary.numeric} numeric inputs",
        soft_wrap=True,
    )
    print_notes(console, log.notes)
    console.print(f"prepared: {log.directory}", soft_wrap=True)


def _is_key(word: str) -> bool:
    """Tells `label=y` from a folder such as `dt=2026-11-02`."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.partition(".")[0] in ReadOptions.model_fields and not Path(word).exists()
