"""Leaderboard: a study's winners, then its front, then all other finished trials, by what is asked for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from dashboards.names import (
    MISSING,
    byte_size,
    decimals,
    known,
    milliseconds,
    percent,
    percent_range,
    si,
    trial_name,
)
from dashboards.rows import known_ne, marks, relative_percent
from dhen.values import Value
from trials.records.findings import Better
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialRecord

By = Literal["ne", "flops", "ms", "test"]
"""What a leaderboard is sorted by, the lowest first."""
KEYS: tuple[By, ...] = get_args(By)


STYLES = {"best": "bold green", "knee": "green", "baseline": "yellow", "winner": "cyan", "front": "cyan"}
GAP = 2
MODEL_WIDTH = 16
"""Columns that the model's name has at least; what is left of the width is its own too."""


class LeaderboardRow(Value):
    """One finished trial and what it costs. Values that are not known are None."""

    trial: int
    marks: tuple[str, ...]
    """What the study says of it: `baseline`, `best`, `knee`, `front`, and `winner` where it was chosen to be
    scored on test."""
    outcome: Outcome
    architecture: str
    """The model in short; of an average, its members."""
    ne: float | None
    """NE on validation."""
    vs_baseline_percent: float | None
    """NE on validation relative to the tuned baseline's."""
    test_ne: float | None
    """NE on test, of the baseline and the winners."""
    difference_percent: float | None
    """NE on test relative to the baseline's, mean over seeds, where `dhen-search confirm` has retrained both."""
    low_percent: float | None
    """Lower end of the 95 % interval of the difference."""
    high_percent: float | None
    """Upper end of that interval."""
    better: Better | None
    """Whether it is better than the baseline, by that comparison."""
    flops: float | None
    """FLOPs of a forward pass per example."""
    forward_ms: float | None
    """Measured milliseconds of a request, where serving has a limit."""
    technique: str | None
    """Memory technique that it was trained under; the planned one if nothing was trained."""
    predicted_peak_bytes: int | None
    """Predicted peak on the fullest rank of the study's cluster."""
    measured_peak_bytes: int | None
    """The peak that was measured."""
    export: str | None
    """Command that takes it away as a bundle; None if no weights are kept."""


class Leaderboard(Value):
    """What `dhen-search leaderboard` shows, and prints with `--json`."""

    study: str
    directory: str
    finished: bool
    running: bool
    by: By
    """What rows are sorted by, in each of three groups: baseline and winners, the rest of the front, all
    others."""
    finished_trials: int
    """Number of trials that have ended; without `--all` most have no row."""
    rows: tuple[LeaderboardRow, ...]


def leaderboard(record: StudyRecord, *, by: By = "ne", everything: bool = False) -> Leaderboard:
    """Returns the leaderboard of a study at any moment of its life.

    Args:
        record: the study.
        by: what rows are sorted by; trials of which it is not known come last.
        everything: all finished trials, not the front and the winners alone.
    """
    ended = [trial for trial in record.trials if not trial.result.outcome.unfinished]
    group = _group_of(record)
    shown = [trial for trial in ended if everything or group(trial) < OTHERS]
    rows = [(group(trial), _row(trial, record)) for trial in shown]
    rows.sort(key=lambda pair: (pair[0], *_order(pair[1], by)))
    return Leaderboard(
        study=record.name,
        directory=record.directory,
        finished=record.finished,
        running=record.running,
        by=by,
        finished_trials=len(ended),
        rows=tuple(row for _, row in rows),
    )


WINNERS, FRONT, OTHERS = range(3)
"""Groups of a leaderboard, in this order."""


def winners(record: StudyRecord) -> set[int]:
    """Returns numbers of the trials that the study has chosen; before that, of the best and the knee so far."""
    if record.choice is not None:
        return {winner.trial for winner in record.choice.winners}
    return {number for number in (record.best, record.knee) if number is not None}


def _group_of(record: StudyRecord) -> Callable[[TrialRecord], int]:
    first, front = winners(record) | {record.baseline, record.best}, set(record.front)

    def group(trial: TrialRecord) -> int:
        return WINNERS if trial.number in first else FRONT if trial.number in front else OTHERS

    return group


def _order(row: LeaderboardRow, by: By) -> tuple[float, float]:
    """Sort key: what is asked for, then NE; what is not known comes last."""
    asked_for = {"ne": row.ne, "flops": row.flops, "ms": row.forward_ms, "test": row.test_ne}[by]
    unknown = math.inf
    return unknown if asked_for is None else asked_for, unknown if row.ne is None else row.ne


def _row(trial: TrialRecord, record: StudyRecord) -> LeaderboardRow:
    result, compared = trial.result, record.comparison(trial.number)
    ne = known_ne(trial)
    chosen = record.choice is not None and trial.number in winners(record)
    tested = result.test.ne if result.test and known(result.test.ne) else None
    return LeaderboardRow(
        trial=trial.number,
        marks=(*marks(trial, record), *(("winner",) if chosen else ())),
        outcome=result.outcome,
        architecture=trial_name(trial),
        ne=ne,
        vs_baseline_percent=relative_percent(ne, known_ne(record.baseline_for(trial))),
        test_ne=tested,
        difference_percent=compared.difference_percent if compared else None,
        low_percent=compared.low_percent if compared else None,
        high_percent=compared.high_percent if compared else None,
        better=compared.better if compared else None,
        flops=trial.job.flops,
        forward_ms=trial.plan.serving_ms,
        technique=result.technique or trial.plan.technique,
        predicted_peak_bytes=trial.plan.peak_bytes,
        measured_peak_bytes=result.measured.peak_memory_bytes,
        export=_export(trial, record) if trial.number in record.exportable else None,
    )


def _export(trial: TrialRecord, record: StudyRecord) -> str:
    pick = "best" if trial.number == record.best else str(trial.number)
    out = "best" if pick == "best" else f"trial-{pick}"
    return f"dhen-search export {shlex.quote(record.directory)} --pick {pick} --out {out}"


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


COLUMNS = (
    _Column(title="trial", cell=lambda row: str(row.trial)),
    _Column(title="", cell=_marks, left=True),
    _Column(title="NE", cell=lambda row: decimals(row.ne, 5)),
    _Column(title="vs baseline", cell=lambda row: percent(row.vs_baseline_percent), droppable=6),
    _Column(title="NE on test", cell=lambda row: decimals(row.test_ne, 5), droppable=2),
    _Column(title="95 % interval", cell=_interval, droppable=5),
    _Column(title="FLOPs", cell=lambda row: si(row.flops)),
    _Column(title="forward", cell=lambda row: milliseconds(row.forward_ms), droppable=3),
    _Column(title="technique", cell=lambda row: row.technique or MISSING, left=True, droppable=4),
    _Column(title="peak", cell=lambda row: byte_size(row.predicted_peak_bytes), droppable=1),
)


def leaderboard_table(board: Leaderboard, width: int) -> tuple[Table, str | None]:
    """Returns the table, and a sentence on the columns that did not fit; None if all did.

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
