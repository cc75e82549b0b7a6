"""`slices`: on which rows is a winner better than the baseline, and on which is it worse?"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from dashboards.names import MISSING, decimals, percent, percent_range
from dashboards.terminal.tables import plain_table
from dhen.errors import UserError
from search.analysis.slices import MOST, bundle_slices, slices
from search.bundles.bundle import is_bundle, read_bundle
from search.bundles.export import log_of, study_log
from search.config import written_config
from search.log_config import data_option
from search.read_study import read_study
from search.run_directory import database_url, study_name
from search.selection import picked
from search.terminal import print_table
from search.verbs.output import PATH, json_option
from trials.records.findings import Slices, WinnerVerdict
from trials.store.ledger import Ledger

OUTPUT = Slices
COLUMNS = (
    "Value",
    "Rows",
    "Positive",
    "NE",
    "Baseline",
    "Difference",
    "95 % interval",
    "Calibration (baseline)",
    "Verdict",
)
LEFT = ("Value", "Verdict")
PICK = "best"
WORDS = {WinnerVerdict.YES: "better", WinnerVerdict.NO: "WORSE", WinnerVerdict.CANNOT_TELL: ""}


@click.command(
    epilog="""\b
Examples:
  dhen-search slices runs/demo --column site
  dhen-search slices runs/demo --column price --pick knee --json
  dhen-search slices runs/demo/best --data log.csv --column site
"""
)
@click.argument("what", metavar="DIR|BUNDLE", type=PATH)
@data_option("Of a bundle: the log on whose test split it is scored.")
@click.option("--column", required=True, help="Categorical: its values; numeric: ten slices of equal size.")
@click.option(
    "--pick",
    "how",
    help=f"Of a study: best, lowest, knee, 'flops<=X', 'ms<=X', 'table_bytes<=X', a number.  [default: {PICK}]",
)
@click.option(
    "--top", default=MOST, show_default=True, type=click.IntRange(min=1), help="Values; others are joined."
)
@click.option(
    "--block-by", help="Of a study: as in `dhen-search confirm`; by default what that has compared with."
)
@json_option("As JSON (trials.records.findings.Slices).")
def command(
    what: Path,
    data: tuple[str, ...],
    column: str,
    how: str | None,
    top: int,
    block_by: str | None,
    as_json: bool,
) -> None:
    """NE and calibration of a winner and of the baseline for each value of a column, on the test split.

    Of a study what `dhen-search confirm` has scored there, so that no slice is quietly lost: with intervals over
    seeds and blocks of rows, and Holm's correction over slices; they are kept for the report,
    which `dhen-search report` writes anew. Of a bundle its NE and calibration alone.
    """
    if is_bundle(what):
        # it is one model, and has no retrainings to draw intervals from
        for option, value in (("--pick", how), ("--block-by", block_by)):
            if value is not None:
                raise UserError(
                    f"{option} {value!r} goes with a study; {what} is a bundle, of one model and without intervals"
                    f": leave {option} out."
                )
        if not data:
            raise UserError(f"{what} is a bundle: --data names the log on whose test split it is scored.")
        bundle = read_bundle(what)
        column_slices = bundle_slices(bundle, log_of(bundle, data), column, most=top)
    elif data:
        raise UserError("--data goes with a bundle; of a study its own log's test split is what was scored.")
    else:
        record = read_study(what)
        trial = picked(record, how or PICK)
        column_slices = slices(record, trial.number, study_log(what), column, most=top, block_by=block_by)
        # for the report; if the ledger cannot be written they are only shown
        config = written_config(what)
        try:
            url, name = database_url(what, config.storage), study_name(what, config.name)
            with contextlib.closing(Ledger(url, name)) as ledger:
                ledger.keep_analysis(column_slices)
        except UserError as error:
            click.echo(f"The slices are not kept for the report: {error}", err=True)
    if as_json:
        click.echo(column_slices.model_dump_json(indent=1))
        return
    against = (
        "" if column_slices.baseline is None else f" against the baseline, trial {column_slices.baseline},"
    )
    click.echo(f"trial {column_slices.trial}{against} on test by {column}; seeds: {len(column_slices.seeds)}")
    rows = [
        (
            each.value,
            f"{each.rows:,}",
            f"{decimals(100 * each.base_rate, 2)} %",
            decimals(each.ne, 5),
            decimals(each.baseline_ne, 5),
            percent(each.difference_percent),
            percent_range(each.low_percent, each.high_percent) if each.low_percent is not None else MISSING,
            f"{decimals(each.calibration, 3)} ({decimals(each.baseline_calibration, 3)})",
            WORDS[each.better],
        )
        for each in column_slices.slices
    ]
    print_table(plain_table(COLUMNS, rows, LEFT))
    worse = [row.value for row in column_slices.slices if row.better is WinnerVerdict.NO]
    if column_slices.baseline is not None:
        click.echo(
            f"worse than the baseline on: {', '.join(worse)}" if worse else "worse on no slice for sure"
        )
        click.echo(f"intervals: over seeds and blocks of rows by {column_slices.blocked_by}")
