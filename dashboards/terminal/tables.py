"""A study in the terminal, with or without a TTY: a table of its trials, a line per trial, its progress."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text

from dashboards import accuracy
from dashboards.rows import TrialRow, trial_rows
from dashboards.sentences import winners
from dashboards.sentences.summary import IN_WORDS
from dashboards.units import decimals, duration, milliseconds, percent, si, word
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord

FORWARD = "forward"
"""Title of the column of forward times, which is shown where any were measured."""
RANKS = "ranks"
"""Title of the column of shapes, which is shown where candidates may have several."""
COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("trial", "right"),
    ("state", "left"),
    ("NE", "right"),
    ("vs baseline", "right"),
    ("FLOPs", "right"),
    (RANKS, "left"),
    (FORWARD, "right"),
    ("examples/s", "right"),
    ("time", "right"),
)
"""Titles and alignment of all columns but the last, the model in short, which takes the room that is left."""
STYLES = {"best": "bold green", "knee": "green", "front": "cyan", "baseline": "yellow"}
OUTCOME_STYLES = {
    Outcome.RUNNING: "blue",
    Outcome.COMPLETED: "",
    Outcome.STOPPED: "dim",
    Outcome.FAILED: "red",
    Outcome.DIVERGED: "red",
}


def trial_table(record: StudyRecord, *, rows: int = 20) -> Table:
    """A table of at most `rows` trials in order of number: those that matter most, then the newest.

    What is left out is said below the table. Marks are words, not colour alone. Where the terminal is narrow
    the model's name gives way, never a number.
    """
    chosen = heapq.nsmallest(rows, record.trials, key=_rank(record))
    shown = trial_rows(record, sorted(chosen, key=lambda trial: trial.number))
    left_out = set()
    if all(trial.plan.serving_ms is None for trial in record.trials):
        left_out.add(FORWARD)
    if record.cluster is None or not record.cluster.shapes:
        left_out.add(RANKS)
    indices = [index for index, (name, _) in enumerate(COLUMNS) if name not in left_out]
    cells = [[row[index] for index in (*indices, -1)] for row in map(_cells, shown)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, (name, justify) in enumerate(COLUMNS[index] for index in indices):
        width = max(len(name), *(len(row[index]) for row in cells)) if cells else len(name)
        table.add_column(name, justify=justify, no_wrap=True, min_width=width)
    table.add_column("model")  # the one column that rich may narrow: its cells are cut, not wrapped
    for row, texts in zip(shown, cells, strict=True):
        table.add_row(*texts, style=_style(row))
    if len(shown) < len(record.trials):
        table.caption = f"{len(shown)} of {len(record.trials)} trials: baseline, front and the newest"
        table.caption_justify = "left"
    return table


def accuracy_table(record: StudyRecord) -> Table | None:
    """Predicted against measured, a row per technique; None where nothing was trained."""
    rows = accuracy.accuracy(record)
    if not rows:
        return None
    return plain_table(accuracy.COLUMNS, map(accuracy.cells, rows), accuracy.COLUMNS[:1])


def winners_table(record: StudyRecord) -> Table | None:
    """Winners against the baseline; None where none was retrained."""
    return plain_table(winners.COLUMNS, winners.rows(record), winners.LEFT) if record.comparisons else None


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> Table:
    """A table with the columns named in `left` aligned to the left, and all others to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name.lower(), justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def trial_line(record: StudyRecord, number: int) -> Text:
    """A line for logs: `trial 7 completed, NE 0.78123 (-0.31 %), 1.2 M FLOPs, 34 s: 3x[attention] d16`."""
    trial = record.trial(number)
    (row,) = trial_rows(record, [trial])
    relative = f" ({percent(row.relative_percent)})" if row.relative_percent is not None else ""
    kind = "baseline" if trial.kind is TrialKind.BASELINE else "trial"
    clauses = (
        f"{kind} {number} {IN_WORDS[trial.result.outcome]}",
        f"NE {decimals(row.ne, 5)}{relative}" if row.ne is not None else "",
        f"{si(trial.job.flops)} FLOPs" if trial.job.flops is not None else "",
        f"{milliseconds(trial.plan.serving_ms)} forward" if trial.plan.serving_ms is not None else "",
        duration(trial.result.seconds) if trial.result.seconds is not None else "",
    )
    remark = f" ({row.remark})" if row.remark else ""
    return Text(f"{', '.join(clause for clause in clauses if clause)}: {row.name}{remark}")


def _rank(record: StudyRecord) -> Callable[[TrialRecord], tuple[int, int]]:
    """Sort key by importance: what runs, baseline, best and knee; the front; then the newest."""
    named, front = {record.baseline, record.best, record.knee}, set(record.front)

    def rank(trial: TrialRecord) -> tuple[int, int]:
        if trial.result.outcome is Outcome.RUNNING or trial.number in named:
            return 0, -trial.number
        return (1 if trial.number in front else 2), -trial.number

    return rank


def _style(row: TrialRow) -> str:
    return STYLES[row.marks[0]] if row.marks else OUTCOME_STYLES.get(row.trial.result.outcome, "magenta")


def _cells(row: TrialRow) -> tuple[Text, ...]:
    """The row's cells as `Text`, so that brackets in a model's name are not read as markup."""
    trial = row.trial
    texts = (
        str(trial.number),
        _state(row),
        decimals(row.ne, 5),
        percent(row.relative_percent),
        si(trial.job.flops),
        word(trial.plan.ranks),
        milliseconds(trial.plan.serving_ms),
        si(trial.result.measured.examples_per_second),
        duration(trial.result.seconds),
        row.name,
    )
    return tuple(Text(text, no_wrap=True, overflow="ellipsis") for text in texts)


def _state(row: TrialRow) -> str:
    """The outcome; for a completed trial what the study says of it, where it says something."""
    outcome = row.trial.result.outcome
    if not row.marks:
        return IN_WORDS[outcome]
    return row.marks[0] if outcome is Outcome.COMPLETED else f"{row.marks[0]}, {IN_WORDS[outcome]}"
