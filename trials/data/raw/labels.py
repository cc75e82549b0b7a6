"""Labels as 0 and 1: exactly two values, whatever they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dhen.errors import UserError, listed
from trials.data.raw.text import coded

_NEGATIVE = {"0", "-1", "false", "f", "no", "n", "noclick", "no_click", "no click", "not_clicked", "negative"}
_POSITIVE = {"1", "true", "t", "yes", "y", "click", "clicked", "positive"}
LISTED = 10
"""Number of values that an error message shows at most."""


def canonical(value: str) -> str:
    """Returns one spelling for "1", "1.0" and "+1", and for "Yes" and "yes"."""
    try:
        number = float(value)
    except ValueError:
        return value.strip().lower()
    return str(int(number)) if number.is_integer() else str(number)


def plain_label(value: str) -> int | None:
    """Returns 0 or 1 where the value says so itself."""
    value = canonical(value)
    return 1 if value in _POSITIVE else 0 if value in _NEGATIVE else None


class LabelReader:
    """Reads the label column batch by batch, and knows at the end whether it was a label column."""

    def __init__(self, column: str, positive: str | None, where: str) -> None:
        self._column = column
        self._positive = None if positive is None else canonical(positive)
        self._where = where
        self.counts: Counter[str] = Counter()
        """Number of rows by canonical value."""
        self.missing = 0

    def read(self, column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Returns labels (N), and which are missing (N; their label is 0).

        Raises:
            UserError: when more than two values were seen, or values of which none is known to be positive, and
                for lists.
        """
        if pa.types.is_nested(column.type):
            raise self._error(f"{column.type}, not one value a row", "A label has exactly two values")
        encoded = coded(column)
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        values = encoded.dictionary.to_pylist()
        missing = codes < 0
        self.missing += int(missing.sum())
        rows = np.bincount(codes[~missing], minlength=len(values))
        for value, count in zip(values, rows.tolist(), strict=True):
            if count:  # a categorical column has a category also where no row is of it any more
                self.counts[canonical(value)] += count
        if len(self.counts) > 2:
            raise self._error(
                f"more than two values: {_listed(self.counts)}", "A label has exactly two values"
            )
        found = [self._label(value) if count else 0 for value, count in zip(values, rows, strict=True)]
        labels = np.array([*found, 0], dtype=np.uint8)
        return labels[codes], missing

    def _label(self, value: str) -> int:
        if self._positive is not None:
            return int(canonical(value) == self._positive)
        label = plain_label(value)
        if label is None:
            raise self._error(
                _listed(self.counts), "Say which value counts as 1 with `positive:` in schema.yaml"
            )
        return label

    def check(self, rows: int, *, skipping: bool) -> None:
        """Raises a UserError unless all rows have labels (or are skipped) and both classes occur."""
        if self.missing and not skipping:
            raise UserError(
                f"{self._where}: {self.missing:,} of {rows:,} rows have no label in {self._column!r}. Give them "
                "one, or leave such rows out with skip_bad_rows, where the command takes it."
            )
        classes = {self._label(value) for value in self.counts}
        if len(classes) < 2:
            remedy = "A label needs both values, clicks and no clicks"
            if self._positive is not None:
                remedy += f"; schema.yaml says that {self._positive!r} is the positive one"
            raise self._error(f"only one class: {_listed(self.counts) or 'no values'}", remedy)

    def _error(self, content: str, remedy: str) -> UserError:
        return UserError(
            f"{self._where}: the label column {self._column!r} holds {content}. {remedy}, or name another column "
            "as the label."
        )


def _listed(values: Iterable[str]) -> str:
    return listed([repr(value) for value in values], LISTED)
