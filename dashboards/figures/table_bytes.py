"""NE on validation against the bytes of embedding tables, and the Pareto front between them."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from dashboards.figures.plane_drawing import drawn_against
from dashboards.figures.plane_points import FrontInfo, Price, info_against
from dashboards.figures.style import empty
from dashboards.units import byte_size, decimals
from trials.study_record import StudyRecord, relative_ne_percent

TABLE_BYTES = Price(
    of=lambda trial: trial.job.table_bytes, words=lambda count: f"{byte_size(count)} of embedding tables"
)
MOST_TICKS = 8
"""Largest number of ticks: their labels, such as `512 KiB`, have room beside each other on a page."""
WIDE = 8.0
"""Ratio of the largest to the smallest tables from which ticks are at powers of two."""


def table_bytes_differ(record: StudyRecord) -> bool:
    """Whether candidates that have a result have tables of different sizes, so that there is a choice."""
    sizes = {trial.job.table_bytes for trial in record.candidates if trial.result.validation is not None}
    return len(sizes - {None}) > 1


def table_bytes_info(record: StudyRecord) -> FrontInfo:
    """What the figure shows; which trials are on the front is read from the record, not worked out here."""
    return info_against(TABLE_BYTES, record, record.table_bytes_front)


def table_bytes_figure(info: FrontInfo) -> go.Figure:
    """The figure, with bytes on a logarithmic axis; lower left is better."""
    if info.frame is None:
        reason = "Shown as soon as a trial has an NE on validation."
        return empty(reason, title="NE against bytes of embedding tables")
    figure = drawn_against(
        info,
        title=_title(info),
        subtitle="NE on validation against embedding tables as training stores them; lower left is better.",
    )
    ticks = _ticks(info)
    labels = [byte_size(tick).replace(".0 ", " ") for tick in ticks]
    figure.update_xaxes(title_text="bytes of embedding tables", tickvals=ticks, ticktext=labels)
    return figure


def _title(info: FrontInfo) -> str:
    if not info.front:
        return "NE against bytes of embedding tables"
    smallest, lowest = info.front[0], info.front[-1]
    if smallest is lowest:
        return f"The lowest NE needs no larger tables than {byte_size(lowest.price)}"
    more = decimals(relative_ne_percent(smallest.ne, lowest.ne), 2)
    return f"Tables of {byte_size(smallest.price)} in place of {byte_size(lowest.price)} raise NE by {more} %"


def _ticks(info: FrontInfo) -> list[float]:
    """Powers of two; where all tables are about as large, sizes at even distances from smallest to largest."""
    prices = [point.price for point in (*info.candidates, *([info.baseline] if info.baseline else []))]
    low, high = min(prices), max(prices)
    if high < WIDE * low:
        count = 5 if high > low else 1
        return [low * (high / low) ** (index / max(1, count - 1)) for index in range(count)]
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = math.ceil((last - first + 1) / MOST_TICKS)
    return [2.0**power for power in range(first, last + 1, step)]
