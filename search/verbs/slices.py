"""`slices`: on which rows is a winner better than the baseline, and on which is it worse?"""

from __future__ import annotations

from pathlib import Path

import click

from dashboards.table import plain_table
from dashboards.units import MISSING, decimals, percent
from search.directory import read_record
from search.export import study_log
from search.front import pick
from search.terminal import print_table
from search.winners.slices import MOST, Slice, slices
from trials.record import Better

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
WORDS = {Better.YES: "better", Better.NO: "WORSE", Better.CANNOT_TELL: ""}


@click.command(
    epilog="""\b
Examples:
  dhen-search slices runs/demo --column site
  dhen-search slices runs/demo --column price --pick knee --json
"""
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--column", required=True, help="Categorical: its values; numeric: ten slices of equal size.")
@click.option("--pick", "how", default="best", show_default=True, help="best, knee, 'flops<=X', or a number.")
@click.option(
    "--top", default=MOST, show_default=True, type=click.IntRange(min=1), help="Values; others are joined."
)
@click.option("--block-by", help="As in `dhen-search confirm`.")
@click.option("--json", "as_json", is_flag=True, help="As JSON (search.winners.slices.Slices).")
def command(directory: Path, column: str, how: str, top: int, block_by: str | None, as_json: bool) -> None:
    """NE and calibration of a winner and of the baseline for each value of a column, on the test split.

    Of what `dhen-search confirm` has scored there, so that no slice is quietly lost: with intervals over seeds and
    blocks of rows, and Holm's correction over slices.
    """
    record = read_record(directory)
    trial = pick([record.trial(number) for number in record.front], how)
    found = slices(record, trial.number, study_log(directory), column, most=top, block_by=block_by)
    if as_json:
        click.echo(found.model_dump_json(indent=1))
        return
    click.echo(
        f"trial {found.trial} against the baseline, trial {found.baseline}, on test by {column}; "
        f"{len(found.seeds)} seeds"
    )
    print_table(plain_table(COLUMNS, map(_row, found.slices), LEFT))
    worse = [each.value for each in found.slices if each.better is Better.NO]
    click.echo(
        f"worse than the baseline on: {', '.join(worse)}" if worse else "on no slice is it surely worse"
    )


def _row(each: Slice) -> tuple[str, ...]:
    between = f"{percent(each.low_percent).removesuffix(' %')} to {percent(each.high_percent)}"
    return (
        each.value,
        f"{each.rows:,}",
        f"{decimals(100 * each.base_rate, 2)} %",
        decimals(each.ne, 5),
        decimals(each.baseline_ne, 5),
        percent(each.difference_percent),
        between if each.low_percent is not None else MISSING,
        f"{decimals(each.calibration, 3)} ({decimals(each.baseline_calibration, 3)})",
        WORDS[each.better],
    )
