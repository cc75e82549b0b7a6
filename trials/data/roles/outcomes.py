"""Recognises columns that say which rows are for training, validation and test: by name and by all values.

A column of names (train, valid, test ...) becomes the split. Numbers of folds do not say which of them are for
test, so that a split by them is offered. Neither is a feature: who is in the test split is no property of a
click.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trials.data.log_schema import IgnoredColumn, LabelColumn, NumericColumn, SplitColumn, SplitRule
from trials.data.raw.columns import coded, is_list
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows, read_batches
from trials.data.roles import names
from trials.data.roles.rules import JudgedColumn
from trials.data.roles.sample import ColumnSample, Sample

# Finds columns that tell the label because they are known only after it: further outcomes of the same event.
#
# A column that has a value only for clicks, or that is named like an outcome and departs from its usual value
# only for clicks, is left out. Any other that all but tells the label alone stays, and is reported.

TELLING_AUC = 0.99
"""AUC from which on a column alone all but tells the label."""
LEAST_CLICKS = 20
"""Number of rows of each label below which nothing is concluded."""
_BINS = 256
_PURE = 0.995
"""Share of rows that must be of one kind."""


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
    left_out = defaultdict[str, list[str]](list)
    telling: dict[str, float] = {}
    unsure: list[str] = []
    for name, judgement in judged.items():
        column = sample.columns[name]
        if isinstance(judgement.column, LabelColumn) or judgement.given or is_list(column.kind):
            continue
        codes = column.codes.astype(np.int64)
        if (
            isinstance(judgement.column, NumericColumn)
            and column.numbers is not None
            and column.distinct > _BINS
        ):
            # many numbers are put into bins of equal size
            ends = np.unique(np.nanquantile(column.row_numbers, np.linspace(0, 1, _BINS)))
            bins = np.searchsorted(ends, column.numbers, side="right")
            codes = np.append(np.where(np.isnan(column.numbers), -1, bins), -1)[codes]
        clicks, others = _counted(codes, labels)
        usual = int(np.argmax(others))
        departs_with, departs_without = clicks.sum() - clicks[usual], others.sum() - others[usual]
        # the usual value of rows without a click has no exceptions among them, but some among clicks
        only_clicks = departs_without <= (1 - _PURE) * departs_with and departs_with >= LEAST_CLICKS
        if others[-1] >= _PURE * others.sum() and clicks[-1] <= (1 - _PURE) * clicks.sum():
            why = "missing exactly where the label is 0"
        elif only_clicks and names.suggests_outcome(name):
            why = "named like an outcome, and unusual only where the label is 1"
        elif isinstance(judgement.column, IgnoredColumn):
            continue
        else:
            auc = auc_out_of_fold(codes, labels)
            if auc >= TELLING_AUC:
                telling[name] = auc
            elif names.plain(name) in names.LABELS:
                unsure.append(name)
            continue
        left_out[why].append(name)
        judged[name] = JudgedColumn(IgnoredColumn(), why, sentence="")
    if left_out:
        reasons = "; ".join(f"{', '.join(map(repr, group))} ({why})" for why, group in left_out.items())
        first = next(iter(left_out.values()))[0]
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


def _counted(codes: NDArray[np.int64], labels: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns how often each value occurs with a click, and without one (2 x D); the last value is the missing
    one."""
    size = int(codes.max(initial=-1)) + 2
    return np.stack([np.bincount(codes[labels == label] % size, minlength=size) for label in (1, 0)])


def auc_out_of_fold(codes: NDArray[np.int64], labels: NDArray[np.float64]) -> float:
    """Returns the AUC of each value's mean label, fitted on a random half of the rows and scored on the other; in
    sample every id would be perfect.

    Args:
        codes: code of each row's value (N), -1 if missing.
        labels: label of each row (N), 0 or 1, NaN if missing.
    """
    fits = np.random.default_rng(0).random(len(labels)) < 0.5
    fitted, scored = (_counted(codes[half], labels[half]) for half in (fits, ~fits))
    rows = np.zeros((4, max(fitted.shape[1], scored.shape[1])))
    for row, each in zip(rows, (*fitted, *scored), strict=True):
        row[: len(each) - 1], row[-1] = each[:-1], each[-1]
    clicks_F, others_F, clicks_S, others_S = rows
    base_rate = clicks_F.sum() / max(1.0, clicks_F.sum() + others_F.sum())
    mean = (clicks_F + base_rate) / (clicks_F + others_F + 1.0)
    _, rank = np.unique(mean, return_inverse=True)
    clicks_R, others_R = np.bincount(rank, clicks_S), np.bincount(rank, others_S)
    below = np.cumsum(others_R) - others_R
    pairs = clicks_R.sum() * others_R.sum()
    return float(np.dot(clicks_R, below + 0.5 * others_R) / pairs) if pairs else 0.5


MOST_VALUES = 20
"""Number of distinct values above which a column is no split: twenty folds are rare."""
TRAIN = ("train", "training", "trn")
VALIDATION = ("validation", "valid", "val", "dev", "development")
TEST = ("test", "testing", "tst", "holdout", "hold_out")
EVALUATION = ("eval", "evaluation")
"""Values that are validation if nothing else is, else test."""
_KNOWN = frozenset((*TRAIN, *VALIDATION, *TEST, *EVALUATION))
WHERE = "in schema.yaml (`dhen-search prepare LOG --out DIR` writes it)"


class FoundSplit(NamedTuple):
    """A column that says how the log is split."""

    judged: JudgedColumn
    rule: SplitRule | None
    """Rule that splits by it; None if the split is only offered."""
    sentence: str
    """Sentence on what was decided, and how to have it otherwise."""


def find_split(
    log: RawLog, column: ColumnSample, otherwise: SplitRule, *, skip_bad_rows: bool
) -> FoundSplit | None:
    """Returns what a column says of the split; None for one that is no split by its name or its values.

    Args:
        log: all of it is looked at where the sample may be: files often begin with all training rows.
        column: of the sample.
        otherwise: the rule by which the log is split without this column.
        skip_bad_rows: as for the sample.
    """
    name, values = column.name, column.values.to_pylist()
    if not names.suggests_split(name) or pa.types.is_nested(column.kind) or not _possible(values):
        return None
    if not column.complete:  # the distinct values of the whole log, as far as there are few
        of_log: dict[str, None] = {}
        for batch in read_batches(log, [name], BadRows(skip=skip_bad_rows)):
            of_log |= dict.fromkeys(coded(batch.table.column(name)).dictionary.to_pylist())
            if not _possible(of_log):
                return None
        values = list(of_log)
    if len(values) < 2:
        return None
    return _of_names(name, values, otherwise) or _of_folds(name, values, otherwise)


def _possible(values: Collection[str]) -> bool:
    """Tells whether these may be names of splits, or numbers of folds, or some of them, as the first rows show."""
    return len(values) <= MOST_VALUES and (
        _are_names(values)
        or all(re.fullmatch(r"\d{1,2}", value) and int(value) <= MOST_VALUES for value in values)
    )


def _are_names(values: Collection[str]) -> bool:
    return {names.plain(value) for value in values} <= _KNOWN


def _of_names(name: str, values: list[str], otherwise: SplitRule) -> FoundSplit | None:
    if not _are_names(values):
        return None
    training, validation, test, evaluation = (
        tuple(value for value in values if names.plain(value) in known)
        for known in (TRAIN, VALIDATION, TEST, EVALUATION)
    )
    if validation:
        test += evaluation
    else:
        validation = evaluation
    lacking = "training" if not training else "" if validation or test else "validation or test"
    if lacking:
        return FoundSplit(
            JudgedColumn(IgnoredColumn(), f"looks like a split, without a value for {lacking} rows"),
            None,
            f"the column {name!r} looks like a split but names no {lacking} rows ({', '.join(values)}): "
            f"it is neither used as the split nor as a feature; its role {WHERE} says so",
        )
    rule = _rule(validation, test, otherwise)
    parts = ", ".join(
        f"{split} is {part:.0%} of the training rows (by {rule.by})"
        if isinstance(part, float)
        else f"{split} is {' and '.join(part)}"
        for split, part in (("validation", rule.validation), ("test", rule.test))
    )
    return FoundSplit(
        JudgedColumn(SplitColumn(), ", ".join(values)),
        rule,
        f"rows are split by the column {name!r}: {parts}, the others are for training; it is no feature. To split "
        f"by {otherwise.by} instead: `{_line(otherwise)}` {WHERE}",
    )


def _of_folds(name: str, values: list[str], otherwise: SplitRule) -> FoundSplit | None:
    folds = sorted(values, key=int)
    first, last = int(folds[0]), int(folds[-1])
    if not names.suggests_folds(name) or first > 1 or list(map(int, folds)) != list(range(first, last + 1)):
        return None
    rule = _rule(tuple(folds[-2:-1]) if len(folds) > 2 else (), tuple(folds[-1:]), otherwise)
    return FoundSplit(
        JudgedColumn(IgnoredColumn(), f"numbers of folds, {folds[0]} to {folds[-1]}"),
        None,
        f"the column {name!r} looks like numbers of folds ({folds[0]} to {folds[-1]}) and is no feature. "
        f"To split by it: `{name}: {{role: split}}` and `{_line(rule)}` {WHERE}; `role: categorical` makes it a "
        "feature",
    )


def _rule(validation: tuple[str, ...], test: tuple[str, ...], otherwise: SplitRule) -> SplitRule:
    """Returns the rule by the column; a part that none of its values names is cut from the training rows."""
    if validation and test:
        return SplitRule(by="column", validation=validation, test=test)
    return otherwise.replace(**({"validation": validation} if validation else {"test": test}))


def _line(rule: SplitRule) -> str:
    """Returns the line that stands in schema.yaml."""
    parts = (
        f"{split}: {part if isinstance(part, float) else '[' + ', '.join(part) + ']'}"
        for split, part in (("validation", rule.validation), ("test", rule.test))
    )
    return f"split: {{by: {rule.by}, {', '.join(parts)}}}"
