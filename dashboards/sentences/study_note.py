"""A study in Markdown, as MLflow shows it beside the study's run: findings, and the front with links to runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from dashboards.names import trial_name
from dashboards.rows import TrialRow, trial_rows
from dashboards.sentences.summary import progress, sentences
from dashboards.sentences.winners import interval
from dashboards.units import MISSING, decimals, percent, si
from trials.study_record import StudyRecord

LinkTo = Callable[[int | None], str | None]
COLUMNS = ("Trial", "NE on validation", "against the baseline", "95 % interval on test", "FLOPs", "technique")
MOST_CHARACTERS = 5000
"""Length that MLflow allows; what is said last is left out first."""
SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+!|~&$-])")


def study_note(record: StudyRecord, link_to: LinkTo, views: Mapping[str, str]) -> str:
    """Returns what was found in sentences, the front as a table, and links.

    Args:
        record: the study.
        link_to: gives the address of a trial's run, or of the study's run for None.
        views: addresses of pages of the study's runs, by what they show.
    """
    first, *further = map(_escaped, sentences(record))
    study = link_to(None)
    report = [f"[the report]({study}/artifacts/report.html)"] if study else []
    pages = ", ".join([*report, *(f"[{shows}]({link})" for shows, link in views.items())])
    start = [f"**{_escaped(progress(record))}**", first]
    end = [f"See {pages}. dhen-search writes this note anew as the study goes on."]
    rows = _front(record, link_to)
    parts = [*start, *([_table(rows)] if rows else []), *further, *end]
    while _length(parts) > MOST_CHARACTERS and further:
        further.pop()
        parts = [*start, *([_table(rows)] if rows else []), *further, *end]
    while _length(parts) > MOST_CHARACTERS and rows:
        rows.pop(0)  # the cheapest, which are the farthest from the best
        parts = [*start, _table(rows), *end]
    return "\n\n".join(parts)


def _front(record: StudyRecord, link_to: LinkTo) -> list[str]:
    """Returns the rows of the front and of the baseline, by FLOPs."""
    shown = [row for row in trial_rows(record) if row.trial.number in (*record.front, record.baseline)]
    shown.sort(key=lambda row: row.trial.job.flops or 0.0)
    return [_row(_cells(row, record, link_to)) for row in shown]


def _table(rows: list[str]) -> str:
    return "\n".join([_row(COLUMNS), _row(["---"] * len(COLUMNS)), *rows])


def _length(parts: list[str]) -> int:
    return sum(len(part) + 2 for part in parts)


def _cells(row: TrialRow, record: StudyRecord, link_to: LinkTo) -> list[str]:
    trial = row.trial
    name, link = _escaped(f"#{trial.number} {trial_name(trial)}"), link_to(trial.number)
    marks = [mark for mark in row.marks if mark != "front"]
    marked = f" **{', '.join(marks)}**" if marks else ""
    comparison = record.comparison(trial.number)
    return [
        (f"[{name}]({link})" if link else name) + marked,
        decimals(row.ne, 5),
        percent(row.relative_percent),
        interval(comparison) if comparison else MISSING,
        si(trial.job.flops),
        _escaped(trial.result.technique or MISSING),
    ]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is, names and words of users included."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
