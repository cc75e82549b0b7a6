"""`export`: writes a picked trial, or a bundle in another form, to take away."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from dashboards.names import byte_size, short_name
from dashboards.sentences.winners import better_line
from dhen.errors import UserError
from search.bundles.bundle import is_bundle, read_bundle
from search.bundles.export import export, log_of, study_log, write_int8
from search.log_config import data_option
from search.read_study import read_study
from search.verbs.output import PATH, ExportedBundle, json_option, print_json

OUTPUT = ExportedBundle
PICK = "best"


@click.command(
    epilog="""\b
Examples:
  dhen-search export runs/demo --pick 'flops<=5e6' --out cheap
  dhen-search export runs/demo --int8-tables --out small
  dhen-search export small --format pt2 --out compiled
  dhen-search export cheap --int8-tables --data log.csv --out small
"""
)
@click.argument("directory", type=PATH, metavar="DIRECTORY|BUNDLE")
@click.option(
    "--pick",
    help="best, lowest, knee, 'flops<=X', 'ms<=X', 'table_bytes<=X', or a trial number. Default: best.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("bundle", "pt2")),
    default="bundle",
    show_default=True,
    help="pt2: compiled by AOTInductor, for processes without Python.",
)
@click.option("--int8-tables", is_flag=True, help="Store embedding tables with 8 bits per value.")
@data_option("For --int8-tables of a BUNDLE: the log on which its cost is measured.")
@click.option("--out", type=PATH, required=True, help="The folder to write.")
@json_option("What was exported, as JSON.")
def command(
    directory: Path,
    pick: str | None,
    form: str,
    int8_tables: bool,
    data: tuple[str, ...],
    out: Path,
    as_json: bool,
) -> None:
    """Write a bundle: configuration, weights, encoding, cost, metrics, environment, checksums.

    Says whether it is better than the baseline, if `dhen-search confirm` has compared them. A BUNDLE that is
    there already is written in another form.
    """
    source = is_bundle(directory)
    if source and pick is not None:
        raise UserError(f"--pick chooses a trial of a study, and {directory} is a bundle: leave it out.")
    if data and not (source and int8_tables):
        raise UserError("--data is for --int8-tables of a BUNDLE; leave it out.")
    if source and form == "bundle" and not int8_tables:
        raise UserError(f"{directory} is a bundle already: give --format pt2 or --int8-tables.")
    if source and int8_tables and not data:
        raise UserError(
            "--int8-tables of a BUNDLE needs --data, the log on which its cost in NE is measured."
        )

    def say(sentence: str) -> None:
        click.echo(sentence, err=as_json)

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".partial") as folder:
        steps = [Path(folder) / "bundle", Path(folder) / "int8"]
        bundle = read_bundle(directory) if source else None
        if bundle is None:
            plain = form == "bundle" and not int8_tables
            record, place = read_study(directory), out if plain else steps[0]
            trial = export(record, study_log(directory), pick or PICK, place)
            assert trial.result.validation is not None
            say(
                f"{out}: trial {trial.number}, NE {trial.result.validation.ne:.5f} on validation, "
                f"{trial.job.flops:,.0f} FLOPs per example"
            )
            say(better_line(record, trial))
            bundle = read_bundle(place)
            say(f"forward: {bundle.info.forward or 'not measured: this device cannot hold it'}")
        if int8_tables:
            log = log_of(bundle, data) if source else study_log(directory)
            say("tables of 8 bits: the network is scored twice, this takes a while ...")
            int8 = out if form == "bundle" else steps[1]
            cost = write_int8(bundle, int8, log)
            say(
                f"{out}: tables of 8 bits, {byte_size(cost.table_bytes)} in place of "
                f"{byte_size(cost.fp32_table_bytes)}; NE on {cost.split} {cost.int8.ne:.5f}, "
                f"{cost.ne_percent:+.4f} % beside {cost.fp32.ne:.5f}"
            )
            bundle = read_bundle(int8)
        if form == "pt2":
            from search.bundles.pt2 import INPUTS, MODEL, write_pt2

            say("AOTInductor compiles the model, this takes half a minute or more ...")
            package = write_pt2(bundle, out)
            compiled = f"{out / MODEL}: compiled for {package.machine}"
            say(f"{compiled}; its probabilities of the stored examples are the bundle's")
            say(f"{out / INPUTS}: inputs {', '.join(one.name for one in package.inputs)}")
    if as_json:
        info = bundle.info
        exported = ExportedBundle(
            bundle=str(out),
            format=form,
            trial=info.trial,
            architectures=tuple(short_name(job.model.to_dict()) for job in info.jobs),
            ne=info.validation.ne,
            flops=info.flops,
            comparison=info.comparison,
            forward=info.forward,
            int8_tables=info.int8_tables,
        )
        print_json(exported)
