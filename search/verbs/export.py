"""`export`: writes a picked trial as a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from dashboards.names import trial_name
from dashboards.sentences.winners import better_line
from search.bundles.bundle import read_bundle
from search.bundles.export import export, study_log
from search.read_study import read_study
from search.verbs.output import ExportedBundle, json_option, print_json

OUTPUT = ExportedBundle


@click.command(epilog="Example: dhen-search export runs/demo --pick 'flops<=5e6' --out cheap")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--pick",
    default="best",
    show_default=True,
    help="best, lowest, knee, 'flops<=X', 'ms<=X', 'table_bytes<=X', or a trial number.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The bundle's folder.")
@json_option("What was exported, as JSON.")
def command(directory: Path, pick: str, out: Path, as_json: bool) -> None:
    """Write a bundle: configuration, weights, encoding, cost, metrics, environment, checksums.

    Says whether it is better than the baseline, where `dhen-search confirm` has compared them.
    """
    record = read_study(directory)
    trial = export(record, study_log(directory), pick, out)
    assert trial.result.validation is not None
    forward = read_bundle(out).info.forward
    if as_json:
        exported = ExportedBundle(
            bundle=str(out),
            trial=trial.number,
            architecture=trial_name(trial),
            ne=trial.result.validation.ne,
            flops=trial.job.flops or 0.0,
            comparison=record.comparison(trial.number),
            forward=forward,
        )
        print_json(exported)
        return
    click.echo(
        f"{out}: trial {trial.number}, NE {trial.result.validation.ne:.5f} on validation, "
        f"{trial.job.flops:,.0f} FLOPs per example"
    )
    click.echo(better_line(record, trial))
    click.echo(f"forward: {forward or 'not measured: this device cannot hold it'}")
