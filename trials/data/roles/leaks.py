"""Finds columns that tell the label because they are known only after it: further outcomes of the same event.

A column that has a value only for clicks, or that is named like an outcome and departs from its usual value only
for clicks, is left out. Any other that all but tells the label alone stays, and is reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trials.data.log_schema import IgnoredColumn, LabelColumn, NumericColumn
from trials.data.raw.text import is_list
from trials.data.roles import names
from trials.data.roles.rules import JudgedColumn
from trials.data.roles.sample import ColumnSample, Sample

TELLING_AUC = 0.99
"""AUC from which on a column alone all but tells the label."""
LEAST_CLICKS = 20
"""Number of rows of each label below which nothing is concluded."""
_BINS = 256
_PURE = 0.995
"""Share of rows that must be of one kind."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """How often each value of a column occurs without (0) and with (1) a click; the last is the missing one."""

    clicks: NDArray[np.int64]
    others: NDArray[np.int64]


def settle_leaks(
    judged: dict[str, JudgedColumn], sample: Sample, labels: NDArray[np.float64]
) -> Iterator[str]:
    """Leaves out the outcomes among the judged columns, and yields what was decided or should be looked at.

    Args:
        judged: all columns of the log; changed in place.
        sample: the log's first rows.
        labels: label of each row (N), 0 or 1, NaN if missing.
    """
    if min(np.sum(labels == 0), np.sum(labels == 1)) < LEAST_CLICKS:
        return
    left_out: dict[str, str] = {}
    telling: dict[str, float] = {}
    unsure: list[str] = []
    for name, judgement in judged.items():
        if isinstance(judgement.column, LabelColumn) or judgement.given or is_list(sample.columns[name].kind):
            continue
        codes = _codes_of(sample.columns[name], judgement)
        counts = _counted(codes, labels)
        if (why := _outcome(name, counts)) is not None:
            left_out[name] = why
            judged[name] = JudgedColumn(IgnoredColumn(), why, sentence="")
        elif not isinstance(judgement.column, IgnoredColumn):
            auc = auc_out_of_fold(codes, labels)
            if auc >= TELLING_AUC:
                telling[name] = auc
            elif names.plain(name) in names.LABELS:
                unsure.append(name)
    yield from _sentences(left_out, telling, unsure)


def _sentences(left_out: Mapping[str, str], telling: Mapping[str, float], unsure: list[str]) -> Iterator[str]:
    if left_out:
        by_reason = defaultdict[str, list[str]](list)
        for name, why in left_out.items():
            by_reason[why].append(repr(name))
        reasons = "; ".join(f"{', '.join(group)} ({why})" for why, group in by_reason.items())
        first = next(iter(left_out))
        yield (
            f"left out, since they are known only after the label: {reasons}; `columns.{first}=numeric` (or "
            "another role) makes one an input"
        )
    for name, auc in telling.items():
        yield (
            f"{name!r} alone all but tells the label (AUC {auc:.3f} on rows that it was not fitted on): if it is "
            f"not known before the event, leave it out with `columns.{name}=ignore`"
        )
    for name in unsure:
        yield (
            f"{name!r} is named like a label, and is an input: if it is not known before the event, leave it out "
            f"with `columns.{name}=ignore`"
        )


def _codes_of(column: ColumnSample, judgement: JudgedColumn) -> NDArray[np.int64]:
    """Returns the code of each row's value (N), -1 if missing; many numbers are put into bins of equal size."""
    codes = column.codes.astype(np.int64)
    numbers = column.numbers
    if not isinstance(judgement.column, NumericColumn) or numbers is None or column.distinct <= _BINS:
        return codes
    ends = np.unique(np.nanquantile(column.row_numbers, np.linspace(0, 1, _BINS)))
    bins = np.where(np.isnan(numbers), -1, np.searchsorted(ends, numbers, side="right"))
    found: NDArray[np.int64] = np.append(bins, -1)[codes]
    return found


def _counted(codes: NDArray[np.int64], labels: NDArray[np.float64]) -> _Counts:
    size = int(codes.max(initial=-1)) + 2
    return _Counts(*(np.bincount(codes[labels == label] % size, minlength=size) for label in (1, 0)))


def _outcome(name: str, counts: _Counts) -> str | None:
    """Returns why a column is an outcome of the event; None if it is not known to be one."""
    clicks, others = counts.clicks.sum(), counts.others.sum()
    if counts.others[-1] >= _PURE * others and counts.clicks[-1] <= (1 - _PURE) * clicks:
        return "missing exactly where the label is 0"
    usual = int(np.argmax(counts.others))
    departs_with = clicks - counts.clicks[usual]
    departs_without = others - counts.others[usual]
    # the usual value of rows without a click has no exceptions among them, but some among clicks
    only_clicks = departs_without <= (1 - _PURE) * departs_with and departs_with >= LEAST_CLICKS
    if only_clicks and names.suggests_outcome(name):
        return "named like an outcome, and unusual only where the label is 1"
    return None


def auc_out_of_fold(codes: NDArray[np.int64], labels: NDArray[np.float64]) -> float:
    """Returns the AUC of each value's mean label, fitted on a random half of the rows and scored on the other; in
    sample every id would be perfect.

    Args:
        codes: code of each row's value (N), -1 if missing.
        labels: label of each row (N), 0 or 1, NaN if missing.
    """
    fits = np.random.default_rng(0).random(len(labels)) < 0.5
    fitted, scored = (_counted(codes[half], labels[half]) for half in (fits, ~fits))
    size = max(len(fitted.clicks), len(scored.clicks))
    rows = np.zeros((4, size))
    for row, each in zip(rows, (fitted.clicks, fitted.others, scored.clicks, scored.others), strict=True):
        row[: len(each) - 1], row[-1] = each[:-1], each[-1]
    clicks_F, others_F, clicks_S, others_S = rows
    base_rate = clicks_F.sum() / max(1.0, clicks_F.sum() + others_F.sum())
    mean = (clicks_F + base_rate) / (clicks_F + others_F + 1.0)
    _, rank = np.unique(mean, return_inverse=True)
    clicks_R, others_R = np.bincount(rank, clicks_S), np.bincount(rank, others_S)
    below = np.cumsum(others_R) - others_R
    pairs = clicks_R.sum() * others_R.sum()
    return float(np.dot(clicks_R, below + 0.5 * others_R) / pairs) if pairs else 0.5
