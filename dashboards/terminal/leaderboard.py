"""The leaderboard as a table: as wide as the terminal allows, the least important columns left out first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from dashboards.leaderboard import Leaderboard, LeaderboardRow
from dashboards.units import MISSING, byte_size, decimals, percent, percent_range, si
from trials.record import Outcome

STYLES = {"best": "bold green", "knee": "green", "baseline": "yellow", "winner": "cyan", "front": "cyan"}
GAP = 2
MODEL_WIDTH = 16
"""Columns that the model's name has at least; what is left of the width is its own too."""


@dataclass(frozen=True, kw_only=True)
class _Column:
    title: str
    cell: Callable[[LeaderboardRow], str]
    left: bool = False
    droppable: int | None = None
    """When the column gives way on a narrow terminal: 1 is the first; None never."""


def _marks(row: LeaderboardRow) -> str:
    """What the study says of a trial, in one or two words; its outcome where it says nothing."""
    said = [mark for mark in row.marks if mark not in ("front", "winner")] or list(row.marks[-1:])
    if row.outcome is not Outcome.COMPLETED:
        said.append(row.outcome.replace("_", " "))
    return ", ".join(said)


def _interval(row: LeaderboardRow) -> str:
    return percent_range(row.low_percent, row.high_percent) if row.low_percent is not None else MISSING


def _forward(row: LeaderboardRow) -> str:
    return f"{row.forward_ms:.3g} ms" if row.forward_ms is not None else MISSING


COLUMNS = (
    _Column(title="trial", cell=lambda row: str(row.trial)),
    _Column(title="", cell=_marks, left=True),
    _Column(title="NE", cell=lambda row: decimals(row.ne, 5)),
    _Column(title="vs baseline", cell=lambda row: percent(row.vs_baseline_percent), droppable=6),
    _Column(title="NE on test", cell=lambda row: decimals(row.test_ne, 5), droppable=2),
    _Column(title="95 % interval", cell=_interval, droppable=5),
    _Column(title="FLOPs", cell=lambda row: si(row.flops)),
    _Column(title="forward", cell=_forward, droppable=3),
    _Column(title="technique", cell=lambda row: row.technique or MISSING, left=True, droppable=4),
    _Column(title="peak", cell=lambda row: byte_size(row.predicted_peak_bytes), droppable=1),
)


def leaderboard_table(board: Leaderboard, width: int) -> tuple[Table, str | None]:
    """Returns the table, and a sentence on the columns that did not fit; None where all did.

    Columns of which nothing is known in any row are left out without a word.

    Args:
        board: what is shown.
        width: columns of the terminal.
    """
    known = [column for column in COLUMNS if any(column.cell(row) != MISSING for row in board.rows)]
    shown = _fitting(known, board, width - MODEL_WIDTH)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for column in shown:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(column.title, justify=justify, no_wrap=True, min_width=_width(column, board))
    table.add_column("model")  # the one column that rich may narrow: its cells are cut, not wrapped
    for row in board.rows:
        cells = (*(column.cell(row) for column in shown), row.architecture)
        style = next((STYLES[mark] for mark in STYLES if mark in row.marks), "")
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells), style=style)
    dropped = [column.title for column in known if column not in shown]
    return table, f"no room for {', '.join(dropped)}: widen the terminal, or --json" if dropped else None


def _fitting(columns: list[_Column], board: Leaderboard, width: int) -> list[_Column]:
    """The columns that fit beside the model, the least important ones left out first."""
    fitting = list(columns)
    while sum(_width(column, board) + GAP for column in fitting) > width:
        giving_way = [column for column in fitting if column.droppable is not None]
        if not giving_way:
            break
        fitting.remove(min(giving_way, key=lambda column: column.droppable or 0))
    return fitting


def _width(column: _Column, board: Leaderboard) -> int:
    return max(cell_len(column.title), *(cell_len(column.cell(row)) for row in board.rows))
