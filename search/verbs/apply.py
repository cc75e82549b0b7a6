"""`apply`: brings increments into a copy of their bundle, or writes a bundle that has them in its weights."""

from __future__ import annotations

from pathlib import Path

import click

from dhen.errors import UserError
from search.bundles.bundle import read_bundle
from search.bundles.export import copy_whole
from search.bundles.increments import only_trainer, take_increments
from search.verbs.output import PATH, AppliedBundle, json_option, print_json

OUTPUT = AppliedBundle


@click.command(
    epilog="""\b
Examples:
  dhen-search apply served live/increments/000004
  dhen-search apply served live/increments/*
  dhen-search apply live --out whole
"""
)
@click.argument("bundle", type=PATH)
@click.argument("increments", nargs=-1, type=PATH, metavar="[INCREMENT ...]")
@click.option("--out", type=PATH, help="Write a bundle with all increments in its weights.")
@json_option("Its version as JSON.")
def command(bundle: Path, increments: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Bring increments into a bundle, in the order given; --out writes the newest version as a whole bundle.

    An increment is refused if it does not follow the bundle's version. Who reads the bundle meanwhile finds
    the version before or the one after.
    """
    opened = read_bundle(bundle)
    if not increments and out is None:
        raise UserError(
            "nothing to do: name increments to bring into the bundle, or --out to write it whole."
        )
    if increments:
        with only_trainer(bundle):
            version = take_increments(bundle, read_bundle(bundle).version, increments)
        opened = read_bundle(bundle)
        opened.check()
        click.echo(f"{bundle}: version {version.number}", err=as_json)
    if out is not None:
        if out.resolve() == bundle.resolve():
            raise UserError(
                f"--out {out} is the bundle itself, whose increments would be gone: give another --out."
            )
        copy_whole(opened, out)
        click.echo(f"{out}: version {opened.version.number}, whole", err=as_json)
    if as_json:
        whole = str(out) if out is not None else None
        print_json(AppliedBundle(bundle=str(bundle), version=opened.version.number, whole=whole))
