"""`convert`: makes growing tables of a bundle's static ones, or static ones of growing ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from search.bundles.bundle import read_bundle
from search.bundles.convert import Kind, convert
from search.verbs.output import ConvertedBundle, ConvertedTableRows, json_option, print_json

OUTPUT = ConvertedBundle


@click.command(
    epilog="""\b
Examples:
  dhen-search convert runs/demo/best --tables growing --out grows
  dhen-search convert runs/demo/best --tables growing --column user --capacity 1000000 --out grows
  dhen-search convert live --tables static --out served
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--tables", type=click.Choice(get_args(Kind)), required=True, help="What tables become.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The new bundle's folder.")
@click.option(
    "--column", "columns", multiple=True, help="A column whose table is converted; all, if not given."
)
@click.option(
    "--capacity",
    type=click.IntRange(min=1),
    help="Capacity of each growing table; twice the rows that are taken, if not given.",
)
@json_option("What became of each table, as JSON.")
def command(
    bundle: Path, tables: Kind, out: Path, columns: tuple[str, ...], capacity: int | None, as_json: bool
) -> None:
    """Convert a bundle's tables to growing or to static ones; every raw row keeps its score, to the bit.

    A growing table takes in ids that are new when it trains, as `online` does. A static one has its ids for good,
    known by their hashes. The newest version is converted, and the bundle stays as it is.
    """
    opened = read_bundle(bundle)
    converted = convert(opened, out, tables, columns=columns, capacity=capacity)
    if as_json:
        rows = tuple(ConvertedTableRows(name=one.name, taken=one.taken, rows=one.rows) for one in converted)
        version = opened.version.number
        print_json(ConvertedBundle(bundle=str(out), kind=tables, version=version, tables=rows))
        return
    for table in converted:
        click.echo(f"{table.name}: {table.taken:,} values with a row of their own, {table.rows:,} rows")
    click.echo(f"{out}: {tables} tables, scores as in version {opened.version.number} of {bundle}")
