"""`prepare`: from a click log to a columnar cache and a schema to edit."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dhen.errors import UserError
from search.dataset import log_files
from search.log_config import read_options
from search.terminal import print_columns, print_notes, step_progress
from search.verbs.output import PATH, PreparedSummary, json_option, print_json
from trials.data.prepare.prepare_log import prepare
from trials.data.raw.sources import open_log
from trials.data.remote import is_url
from trials.data.roles.infer import InferredSchema, infer
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
@click.option("--out", type=PATH, help="The prepared log's folder (default: a cache).")
@click.option("--schema", type=PATH, help="A schema.yaml that you edited.")
@click.option("--label", help="The label: a column, or such as 'rating>=4' or clicks/impressions.")
@click.option("--weight", help="The column of the example's weight, such as the impressions of a rate.")
@click.option("--skip-bad-rows", is_flag=True, help="Leave out rows that cannot be read, and count them.")
@click.option(
    "--check", is_flag=True, help="Only say how the log would be read, from its first 100,000 rows."
)
@json_option("What was prepared, as JSON.")
def command(
    sources: tuple[str, ...],
    log_format: str | None,
    out: Path | None,
    schema: Path | None,
    label: str | None,
    weight: str | None,
    skip_bad_rows: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Prepare LOG (files, a folder or a URL) once; studies, trainings and verifications reuse it.

    Keys: label, weight, columns.NAME, format, csv.KEY, split.KEY, growing.KEY, skip_bad_rows.
    """
    console = Console(stderr=as_json)
    # `label=y` is a key; a URL, and a folder such as `dt=2026-11-02`, are not
    words = [word for word in sources if "=" in word and not is_url(word) and not Path(word).exists()]
    given = {"format": log_format, "label": label, "weight": weight, "skip_bad_rows": skip_bad_rows or None}
    options = read_options(words, **given)
    named = [source for source in sources if source not in words]
    if check:
        if schema is not None or out is not None:
            raise UserError("--check writes nothing and reads no schema.yaml: leave --out and --schema out.")
        with step_progress(console) as progress:
            files = log_files(named, progress=progress)
        raw = open_log(files, options.format, options.csv, whole=False)
        _check(infer(raw, options), console, as_json=as_json)
        return
    with step_progress(console) as progress:
        log = prepare(
            log_files(named, progress=progress),
            out=out,
            options=options,
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
                columns=log.manifest.findings,
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
    print_columns(console, log.manifest.findings)
    print_notes(console, log.notes)
    console.print(f"prepared: {log.directory}", soft_wrap=True)


def _check(inferred: InferredSchema, console: Console, *, as_json: bool) -> None:
    """Says how a log would be read, and what its first rows cannot show."""
    schema = inferred.schema
    unknown = [
        f"looked at {inferred.rows:,} of {'' if inferred.complete else 'about '}{inferred.rows_of_log:,} rows",
        "only the whole log shows: rows and clicks of each part of the split, values that no row so far has, rows "
        "that cannot be read, quotes after backslashes and bytes that are no UTF-8 further on",
    ]
    if schema.split.by == "auto":
        unknown.append(
            "rows are split by position, or at random if the log turns out to be sorted (split.by=...)"
        )
    if as_json:
        whole = dict.fromkeys(("directory", "fingerprint", "rows", "base_rate", "table_rows"))
        summary = PreparedSummary(
            **whole,
            tables=len(schema.tables),
            numeric=len(schema.numeric),
            notes=inferred.sentences,
            columns=inferred.findings,
            unknown=tuple(unknown),
        )
        print_json(summary)
        return
    print_columns(console, inferred.findings)
    print_notes(console, (*inferred.sentences, *unknown))
