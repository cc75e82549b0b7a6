"""`export`: writes a picked trial as a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from dashboards.sentences.winners import better_line
from search.bundles.bundle import read_bundle
from search.bundles.export import export, study_log
from search.read_study import read_study


@click.command(epilog="Example: dhen-search export runs/demo --pick 'flops<=5e6' --out cheap")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--pick",
    default="best",
    show_default=True,
    help="best, lowest, knee, 'flops<=X', 'ms<=X', 'table_bytes<=X', or a trial number.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The bundle's folder.")
def command(directory: Path, pick: str, out: Path) -> None:
    """Write a bundle: configuration, weights, encoding, cost, metrics, environment, checksums.

    Says whether it is better than the baseline, where `dhen-search confirm` has compared them.
    """
    record = read_study(directory)
    trial = export(record, study_log(directory), pick, out)
    assert trial.result.validation is not None
    click.echo(
        f"{out}: trial {trial.number}, NE {trial.result.validation.ne:.5f} on validation, "
        f"{trial.job.flops:,.0f} FLOPs per example"
    )
    click.echo(better_line(record, trial))
    click.echo(f"forward: {read_bundle(out).info.forward or 'not measured: this device cannot hold it'}")
