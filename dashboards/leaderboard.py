"""Leaderboard: a study's winners, then its front, then all other finished trials, by what is asked for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

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
from dashboards.rows import known_ne, marks, relative_percent, winner_reasons
from dhen.values import Value
from trials.records.findings import WinnerVerdict
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialRecord

By = Literal["ne", "flops", "ms", "test"]
"""What a leaderboard is sorted by, the lowest first."""
KEYS: tuple[By, ...] = get_args(By)
COMPARED = ("difference_percent", "low_percent", "high_percent", "better")
"""Fields of a comparison that a row has."""
STYLES = {"best": "bold green", "knee": "green", "baseline": "yellow", "winner": "cyan", "front": "cyan"}
GAP = 2
MODEL_WIDTH = 16
"""Columns that the model's name has at least; what is left of the width is its own too."""


class LeaderboardRow(Value):
    """One finished trial and what it costs. Values that are not known are None."""

    trial: int
    marks: tuple[str, ...]
    """What the study says of it: `baseline`, `best`, `knee`, `front`, and `winner` if it was chosen to be
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
    """NE on test relative to the baseline's, mean over seeds, if `dhen-search confirm` has retrained both."""
    low_percent: float | None
    """Lower end of the 95 % interval of the difference."""
    high_percent: float | None
    """Upper end of that interval."""
    better: WinnerVerdict | None
    """Whether it is better than the baseline, by that comparison."""
    flops: float | None
    """FLOPs of a forward pass per example."""
    forward_ms: float | None
    """Measured milliseconds of a request, if serving has a limit."""
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
    first, front = winners(record) | {record.baseline, record.best}, set(record.front)
    rows: list[tuple[tuple[float, ...], LeaderboardRow]] = []
    for trial in ended:
        group = WINNERS if trial.number in first else FRONT if trial.number in front else OTHERS
        if everything or group < OTHERS:
            row = _row(trial, record)
            asked_for = {"ne": row.ne, "flops": row.flops, "ms": row.forward_ms, "test": row.test_ne}[by]
            known_or_last = (math.inf if value is None else value for value in (asked_for, row.ne))
            rows.append(((group, *known_or_last), row))
    rows.sort(key=lambda pair: pair[0])
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
        return set(winner_reasons(record))
    return {number for number in (record.best, record.knee) if number is not None}


def _row(trial: TrialRecord, record: StudyRecord) -> LeaderboardRow:
    result, compared = trial.result, record.comparison(trial.number)
    ne = known_ne(trial)
    chosen = record.choice is not None and trial.number in winners(record)
    tested = result.test.ne if result.test and known(result.test.ne) else None
    pick, out = str(trial.number), f"trial-{trial.number}"
    if trial.number == record.best:
        pick = out = "best"
    export = f"dhen-search export {shlex.quote(record.directory)} --pick {pick} --out {out}"
    return LeaderboardRow(
        trial=trial.number,
        marks=(*marks(trial, record), *(("winner",) if chosen else ())),
        outcome=result.outcome,
        architecture=trial_name(trial),
        ne=ne,
        vs_baseline_percent=relative_percent(ne, known_ne(record.baseline_for(trial))),
        test_ne=tested,
        **{name: getattr(compared, name, None) for name in COMPARED},
        flops=trial.job.flops,
        forward_ms=trial.plan.serving_ms,
        technique=result.technique or trial.plan.technique,
        predicted_peak_bytes=trial.plan.peak_bytes,
        measured_peak_bytes=result.measured.peak_memory_bytes,
        export=export if trial.number in record.exportable else None,
    )


class _Column(NamedTuple):
    title: str
    cell: Callable[[LeaderboardRow], str]
    droppable: int | None = None
    """When the column gives way on a narrow terminal: 1 is the first; None never."""
    left: bool = False


def _marks(row: LeaderboardRow) -> str:
    """The marks of a trial, in one or two words; its outcome if it has none."""
    said = [mark for mark in row.marks if mark not in ("front", "winner")] or list(row.marks[-1:])
    if row.outcome is not Outcome.COMPLETED:
        said.append(row.outcome.replace("_", " "))
    return ", ".join(said)


def _interval(row: LeaderboardRow) -> str:
    return percent_range(row.low_percent, row.high_percent) if row.low_percent is not None else MISSING


COLUMNS = (
    _Column("trial", lambda row: str(row.trial)),
    _Column("", _marks, left=True),
    _Column("NE", lambda row: decimals(row.ne, 5)),
    _Column("vs baseline", lambda row: percent(row.vs_baseline_percent), droppable=6),
    _Column("NE on test", lambda row: decimals(row.test_ne, 5), droppable=2),
    _Column("95 % interval", _interval, droppable=5),
    _Column("FLOPs", lambda row: si(row.flops)),
    _Column("forward", lambda row: milliseconds(row.forward_ms), droppable=3),
    _Column("technique", lambda row: row.technique or MISSING, droppable=4, left=True),
    _Column("peak", lambda row: byte_size(row.predicted_peak_bytes), droppable=1),
)


def leaderboard_table(board: Leaderboard, width: int) -> tuple[Table, str | None]:
    """Returns the table, and a sentence on the columns that did not fit; None if all did.

    Columns of which nothing is known in any row are left out without a word.

    Args:
        board: what is shown.
        width: columns of the terminal.
    """
    texts = {column: [column.cell(row) for row in board.rows] for column in COLUMNS}
    known = [column for column, cells in texts.items() if any(cell != MISSING for cell in cells)]
    widths = {column: max(map(cell_len, (column.title, *texts[column]))) for column in known}
    shown, room = list(known), width - MODEL_WIDTH
    droppable = sorted(
        (column for column in known if column.droppable), key=lambda column: column.droppable or 0
    )
    for column in droppable:
        if sum(widths[one] + GAP for one in shown) > room:
            shown.remove(column)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    for column in shown:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(column.title, justify=justify, no_wrap=True, min_width=widths[column])
    table.add_column("model")  # the one column that rich may narrow: its cells are cut, not wrapped
    for index, row in enumerate(board.rows):
        cells = (*(texts[column][index] for column in shown), row.architecture)
        style = next((STYLES[mark] for mark in STYLES if mark in row.marks), "")
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells), style=style)
    dropped = [column.title for column in known if column not in shown]
    return table, f"no room for {', '.join(dropped)}: widen the terminal, or --json" if dropped else None
