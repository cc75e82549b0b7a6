"""Winners against the baseline by the values of columns: on which rows they are better (`dhen-search slices`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import empty
from dashboards.figures.worth.estimates import Estimate, estimates_figure
from dashboards.names import trial_name
from dashboards.rows import find
from dashboards.units import decimals
from trials.analyses import Better, Slice
from trials.study_record import StudyRecord

TITLE = "Where winners are better than the baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedColumn:
    """A winner on the slices of one column."""

    trial: int
    name: str
    column: str
    seeds: int
    blocked_by: str | None
    slices: tuple[Slice, ...]
    """Those for which a difference could be worked out, in the order of the column."""
    undecided: int
    """Number of slices without a difference: their rows lie in one block, or their labels are all equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesInfo:
    """What the figure shows."""

    columns: tuple[SlicedColumn, ...]
    directory: str


def slices_info(record: StudyRecord) -> SlicesInfo:
    """What the figure shows: slices that the ledger has, against the study's baseline of today."""
    columns = []
    for sliced in record.slices:
        trial = find(record, sliced.trial)
        if trial is None or sliced.baseline != record.baseline:
            continue
        shown = tuple(each for each in sliced.slices if each.difference_percent is not None)
        column = SlicedColumn(
            trial=sliced.trial,
            name=trial_name(trial),
            column=sliced.column,
            seeds=len(sliced.seeds),
            blocked_by=sliced.blocked_by,
            slices=shown,
            undecided=len(sliced.slices) - len(shown),
        )
        columns.append(column)
    return SlicesInfo(columns=tuple(columns), directory=record.directory)


def slices_figure(info: SlicesInfo) -> go.Figure:
    """A row per slice; left of 0 the winner has the lower NE."""
    several = len({column.trial for column in info.columns}) > 1
    rows = [row for column in info.columns for row in _rows(column, several=several)]
    if not rows:
        reason = (
            f"Shown once `dhen-search slices {info.directory} --column NAME` has compared a winner "
            "with the baseline "
            "by the values of a column."
        )
        return empty(reason, title=TITLE)
    blocks = ", ".join(sorted({column.blocked_by or "order" for column in info.columns}))
    winners = "; ".join(dict.fromkeys(f"trial {column.trial}: {column.name}" for column in info.columns))
    subtitle = (
        f"NE on test relative to the baseline's, by the values of columns, over "
        f"{info.columns[0].seeds} seeds; 95 % "
        f"intervals over seeds and blocks of rows by {blocks}, verdicts after Holm's correction over "
        "the slices of a "
        f"column. {winners}."
    )
    undecided = sum(column.undecided for column in info.columns)
    if undecided:
        subtitle += f" {undecided} more slices have too few rows for an interval."
    return estimates_figure(
        rows,
        title=_title(info),
        subtitle=subtitle,
        axis="NE on test against the baseline (left is better)",
        words=("better than the baseline", "worse than the baseline", "cannot tell"),
    )


def _rows(column: SlicedColumn, *, several: bool) -> Iterator[Estimate]:
    """A row per slice, with the winner's number where there are several."""
    trial = f"trial {column.trial}: " if several else ""
    for each in column.slices:
        assert each.difference_percent is not None
        yield Estimate(
            label=f"{trial}{column.column} {each.value} ({each.rows:,} rows)",
            percent=each.difference_percent,
            low=each.low_percent,
            high=each.high_percent,
            better=each.better,
            hover=(
                f"NE {decimals(each.ne, 5)}, the baseline's {decimals(each.baseline_ne, 5)}",
                f"calibration {decimals(each.calibration, 3)} ({decimals(each.baseline_calibration, 3)})",
                f"{decimals(100 * each.base_rate, 2)} % positive",
            ),
        )


def _title(info: SlicesInfo) -> str:
    slices = [each for column in info.columns for each in column.slices]
    better = sum(each.better is Better.YES for each in slices)
    worse = sum(each.better is Better.NO for each in slices)
    return f"Better than the baseline on {better} of {len(slices)} slices, worse on {worse}, for sure"
