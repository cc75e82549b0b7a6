"""A log as it stood earlier or stands later: training rows before an origin, and the period after it in place of
validation; or the rows of training and validation together, as there are no later ones to choose by any more.

Rolling-origin evaluation (Tashman, International Journal of Forecasting 2000) judges a model on several
periods, each after the rows that it was trained on. Vocabularies and statistics stay those of all training
rows, so that ids of the period after an origin may have rows in tables, which are untrained then.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.data.encoding import Bags
from trials.data.prepared_log import PreparedLog, Split
from trials.records.metrics import example_weights

JOINED = ("train", "validation")
"""Splits whose rows are joined, in this order."""


class JoinedArray:
    """Two arrays as one along their first axis, indexed as numpy arrays are: by rows, a slice of rows, or a slice
    of rows and a column. Only the rows asked for are read, so memory-mapped arrays are joined without a copy."""

    def __init__(self, first: NDArray[Any], second: NDArray[Any], *, added: int = 0) -> None:
        """Joins arrays of one dtype and equal shapes after the first axis.

        Args:
            first: the earlier rows.
            second: the later rows.
            added: what is added to the values of `second`, for offsets that go on counting.
        """
        self._first, self._second, self._border = first, second, len(first)
        self._added = first.dtype.type(added)
        self.dtype = first.dtype
        self.shape: tuple[int, ...] = (len(first) + len(second), *first.shape[1:])
        self.nbytes = first.nbytes + second.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        rows, *columns = key if isinstance(key, tuple) else (key,)
        if not isinstance(rows, slice):
            return self.take(rows)
        start, stop, step = rows.indices(len(self))
        assert step == 1
        if stop <= self._border:
            return self._first[(slice(start, stop), *columns)]
        later = slice(max(start - self._border, 0), stop - self._border)
        of_second = self._second[(later, *columns)] + self._added
        if start >= self._border:
            return of_second
        return np.concatenate([self._first[(slice(start, self._border), *columns)], of_second])

    def take(self, rows: Any, axis: int = 0, out: None = None, mode: str = "raise") -> NDArray[Any]:
        """Returns the given rows, in the order given; `np.take` calls this with its own arguments."""
        assert (axis, out, mode) == (0, None, "raise")
        rows = np.asarray(rows)
        is_later = rows >= self._border
        taken = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        taken[~is_later] = self._first[rows[~is_later]]
        taken[is_later] = self._second[rows[is_later] - self._border] + self._added
        return taken

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


class LogAtOrigin(PreparedLog):
    """A prepared log whose training rows end at an origin; test is not part of it."""

    def __init__(self, log: PreparedLog, origin: int) -> None:
        """The log at an origin.

        Args:
            log: the whole log, whose training rows are in the order of time.
            origin: number of training rows before the origin; validation is as many rows after it as the whole
                log's validation has, or those that are left.
        """
        rows = log.manifest.rows
        assert 0 < origin < rows["train"]
        after = min(rows["validation"], rows["train"] - origin)
        known = log.manifest.replace(rows=rows | {"train": origin, "validation": after}, ne_floor=None)
        super().__init__(log.directory, known)
        self._parts = {"train": (0, origin), "validation": (origin, origin + after)}

    def split(self, name: str) -> Split:
        """Returns train or validation at this origin."""
        first, last = self._parts[name]
        whole = super().split("train")
        arrays = {
            kept: values[first:last]
            for kept in ("labels", "weight", "oracle", "timestamp")
            if (values := getattr(whole, kept)) is not None
        }
        inputs = whole.inputs.slice(first, last)
        part: Split = dataclasses.replace(whole, name=name, inputs=inputs, pair=None, **arrays)
        weights = example_weights(part.labels, part.weight, self.schema.negative_sampling_rate)
        return dataclasses.replace(part, base_rate=float(np.average(part.labels, weights=weights)))


class LogWithValidation(PreparedLog):
    """A prepared log whose training rows are those of training and, after them, those of validation.

    Validation is there as well, as it was: what is measured on it says nothing of rows that are not trained on.
    Vocabularies and statistics stay those of the training rows.
    """

    def __init__(self, log: PreparedLog) -> None:
        """The log with its rows joined."""
        rows, rate = log.manifest.rows, log.schema.negative_sampling_rate
        parts = [log.split(name) for name in JOINED]
        weights = [example_weights(part.labels, part.weight, rate) for part in parts]
        of_part = [
            float(part.rows if weight is None else weight.sum())
            for part, weight in zip(parts, weights, strict=True)
        ]
        base_rate = float(np.average([part.base_rate for part in parts], weights=of_part))
        known = log.manifest.replace(
            rows=rows | {"train": rows["train"] + rows["validation"]},
            base_rate=log.manifest.base_rate | {"train": base_rate},
        )
        super().__init__(log.directory, known)

    def split(self, name: str) -> Split:
        """Returns a split; train has the rows of both, read from where those of each lie."""
        split = super().split(name)
        if name != "train":
            return split
        later = super().split("validation")
        bags = []
        for first, second in zip(split.inputs.bags, later.inputs.bags, strict=True):
            ids: Any = JoinedArray(first.ids, second.ids)
            offsets: Any = JoinedArray(first.offsets, second.offsets[1:], added=int(first.offsets[-1]))
            bags.append(Bags(ids=ids, offsets=offsets))
        of_inputs = _joined(split.inputs, later.inputs, "categorical", "numeric", "keys", "share")
        inputs = dataclasses.replace(split.inputs, bags=tuple(bags), **of_inputs)
        arrays = _joined(split, later, "labels", "weight", "oracle", "timestamp", "pair")
        return dataclasses.replace(split, inputs=inputs, **arrays)


def _joined(first: Any, second: Any, *names: str) -> dict[str, Any]:
    """Returns the arrays of two values that have these names, as far as there are any."""
    arrays = ((name, getattr(first, name), getattr(second, name)) for name in names)
    return {name: JoinedArray(one, other) for name, one, other in arrays if one is not None}


def origins_of(log: PreparedLog, count: int) -> list[int]:
    """Returns the origins of so many periods before validation, as long as it is, the latest first.

    Of periods whose training rows would be fewer than half of all, none is returned.
    """
    train, period = log.manifest.rows["train"], log.manifest.rows["validation"]
    origins = (train - number * period for number in range(1, count + 1))
    return [origin for origin in origins if 2 * origin >= train]


def check_origins(log: PreparedLog, count: int) -> None:
    """Raises UserError if so many periods before validation cannot be judged on the log."""
    if not log.manifest.chronological:
        raise UserError(
            f"origins={count} judges on earlier periods, and this log's rows have no time stamps, or are not in "
            "their order; leave origins out."
        )
    most = len(origins_of(log, count))
    if most < count:
        raise UserError(
            f"origins={count}: only {most} periods as long as validation leave half of the training rows before "
            f"them; give at most origins={most}, or a shorter validation in schema.yaml."
        )


# A log whose training rows have labels that a teacher has softened: knowledge distillation (arXiv 1503.02531).
#
# Binary cross-entropy is linear in its label, so the mean of the losses against the label and against what a
# teacher predicts is the loss against the mean of the two. Validation and test keep the labels of the log.
#
# Shapes: N training rows; M rows of training and validation together.

TEACHER_SHARE = 0.5
"""Share of a teacher's prediction in a label. Half gained on two logs; all of it gained more on the one where
there is little to learn by heart, and lost on the other (docs/log.md)."""


class TaughtLog(PreparedLog):
    """A prepared log, with labels that a teacher has softened."""

    def __init__(self, log: PreparedLog, file: Path) -> None:
        """The log with a teacher's predictions, which `save_teacher` has written.

        Raises:
            UserError: if they are missing, or are not those of the log's training rows.
        """
        super().__init__(log.directory, log.manifest)
        self._log = log
        if not file.exists():
            raise UserError(
                f"{file}: what the teacher predicts is gone, so a network that learnt from it cannot be trained "
                "again. Networks that learnt from labels alone can; `distil=no` leaves the others out."
            )
        labels_N = np.asarray(log.split("train").labels)
        rows = len(labels_N)
        taught_M: NDArray[np.float32] = np.load(file, mmap_mode="r", allow_pickle=False)
        if taught_M.shape not in ((rows,), (rows + log.manifest.rows["validation"],)):
            raise UserError(f"{file} has {taught_M.shape} predictions, and the log has {rows} training rows.")
        self._labels_N = (1.0 - TEACHER_SHARE) * labels_N + np.float32(TEACHER_SHARE) * taught_M[:rows]

    def split(self, name: str) -> Split:
        """Returns a split; labels of `train` are softened."""
        split = self._log.split(name)
        return dataclasses.replace(split, labels=self._labels_N) if name == "train" else split


def save_teacher(probability_M: NDArray[np.float32], file: Path) -> None:
    """Writes what a teacher predicts for the training rows, and after them those of validation, for networks that
    are trained on both, in the order of the log; whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, probability_M.astype(np.float32))
