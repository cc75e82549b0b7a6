"""Recognises columns that say which rows are for training, validation and test: by name and by all values.

A column of names (train, valid, test ...) becomes the split. Numbers of folds do not say which of them are for
test, so that a split by them is offered. Neither is a feature: who is in the test split is no property of a click.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa

from trials.data.log_schema import IgnoredColumn, SplitColumn, SplitRule
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows, read_batches
from trials.data.raw.text import coded
from trials.data.roles import names
from trials.data.roles.rules import JudgedColumn
from trials.data.roles.sample import ColumnSample

MOST_VALUES = 20
"""Number of distinct values above which a column is no split: twenty folds are rare."""
TRAIN = ("train", "training", "trn")
VALIDATION = ("validation", "valid", "val", "dev", "development")
TEST = ("test", "testing", "tst", "holdout", "hold_out")
EVALUATION = ("eval", "evaluation")
"""Values that are validation where nothing else is, else test."""
_KNOWN = frozenset((*TRAIN, *VALIDATION, *TEST, *EVALUATION))
WHERE = "in schema.yaml (`dhen-search prepare LOG --out DIR` writes it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSplit:
    """A column that says how the log is split."""

    name: str
    judged: JudgedColumn
    rule: SplitRule | None
    """Rule that splits by it; None where the split is only offered."""
    sentence: str
    """Sentence on what was decided, and how to have it otherwise."""

    def left_for(self, chosen: str) -> FoundSplit:
        """Returns the same column where another one, which came first, is the split."""
        if self.rule is None:
            return self
        sentence = (
            f"the column {self.name!r} looks like a split too: it is no feature, and {chosen!r} is used"
        )
        judged = JudgedColumn(IgnoredColumn(), f"a split ({self.judged.why}); {chosen!r} is used")
        return FoundSplit(name=self.name, judged=judged, rule=None, sentence=sentence)


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
    if not names.suggests_split(column.name) or pa.types.is_nested(column.kind):
        return None
    if not _possible(column.values.to_pylist()):
        return None
    values = column.values.to_pylist() if column.complete else _all_values(log, column.name, skip_bad_rows)
    if len(values) < 2 or not _possible(values):
        return None
    return _of_names(column.name, values, otherwise) or _of_folds(column.name, values, otherwise)


def _possible(values: Collection[str]) -> bool:
    return len(values) <= MOST_VALUES and (_are_names(values) or _are_folds(values))


def _are_names(values: Collection[str]) -> bool:
    return {names.plain(value) for value in values} <= _KNOWN


def _are_folds(values: Collection[str]) -> bool:
    """Returns whether these may be numbers of folds, or some of them, as the first rows show them."""
    return all(re.fullmatch(r"\d{1,2}", value) and int(value) <= MOST_VALUES for value in values)


def _all_values(log: RawLog, name: str, skip_bad_rows: bool) -> list[str]:
    """Returns the distinct values of one column of the whole log, as far as there are few."""
    values: dict[str, None] = {}
    for batch in read_batches(log, [name], BadRows(skip=skip_bad_rows)):
        values |= dict.fromkeys(coded(batch.table.column(name)).dictionary.to_pylist())
        if not _possible(values):
            break
    return list(values)


def _of_names(name: str, values: list[str], otherwise: SplitRule) -> FoundSplit | None:
    if not _are_names(values):
        return None
    validation, test, evaluation = (_among(values, known) for known in (VALIDATION, TEST, EVALUATION))
    if validation:
        test += evaluation
    else:
        validation = evaluation
    lacking = "training" if not _among(values, TRAIN) else "" if validation or test else "validation or test"
    if lacking:
        return FoundSplit(
            name=name,
            judged=JudgedColumn(IgnoredColumn(), f"looks like a split, without a value for {lacking} rows"),
            rule=None,
            sentence=f"the column {name!r} looks like a split but names no {lacking} rows ({', '.join(values)}): "
            f"it is neither used as the split nor as a feature; its role {WHERE} says so",
        )
    rule = _rule(validation, test, otherwise)
    return FoundSplit(
        name=name,
        judged=JudgedColumn(SplitColumn(), ", ".join(values)),
        rule=rule,
        sentence=f"rows are split by the column {name!r}: {_part('validation', rule)}, {_part('test', rule)}, "
        f"the others are for training; it is no feature. To split by {otherwise.by} instead: "
        f"`{_line(otherwise)}` {WHERE}",
    )


def _of_folds(name: str, values: list[str], otherwise: SplitRule) -> FoundSplit | None:
    folds = sorted(values, key=int)
    if not names.suggests_folds(name) or [int(fold) - int(folds[0]) for fold in folds] != list(
        range(len(folds))
    ):
        return None
    if int(folds[0]) > 1:
        return None
    rule = _rule(tuple(folds[-2:-1]) if len(folds) > 2 else (), tuple(folds[-1:]), otherwise)
    return FoundSplit(
        name=name,
        judged=JudgedColumn(IgnoredColumn(), f"numbers of folds, {folds[0]} to {folds[-1]}"),
        rule=None,
        sentence=f"the column {name!r} looks like numbers of folds ({folds[0]} to {folds[-1]}) and is no feature. "
        f"To split by it: `{name}: {{role: split}}` and `{_line(rule)}` {WHERE}; `role: categorical` makes it a "
        "feature",
    )


def _among(values: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    return tuple(value for value in values if names.plain(value) in known)


def _rule(validation: tuple[str, ...], test: tuple[str, ...], otherwise: SplitRule) -> SplitRule:
    """Returns the rule by the column; a part that none of its values names is cut from the training rows."""
    if validation and test:
        return SplitRule(by="column", validation=validation, test=test)
    return otherwise.replace(**({"validation": validation} if validation else {"test": test}))


def _part(split: str, rule: SplitRule) -> str:
    listed = rule.validation if split == "validation" else rule.test
    if isinstance(listed, float):
        return f"{split} is {listed:.0%} of the training rows (by {rule.by})"
    return f"{split} is {' and '.join(listed)}"


def _line(rule: SplitRule) -> str:
    """Returns the line that stands in schema.yaml."""
    parts = (
        f"{split}: {part if isinstance(part, float) else '[' + ', '.join(part) + ']'}"
        for split, part in (("validation", rule.validation), ("test", rule.test))
    )
    return f"split: {{by: {rule.by}, {', '.join(parts)}}}"
