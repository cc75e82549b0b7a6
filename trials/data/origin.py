"""A log as it stood earlier or stands later: training rows before an origin, and the period after it in place of
validation; or the rows of training and validation together, as there are no later ones to choose by any more.

Rolling-origin evaluation (Tashman, International Journal of Forecasting 2000) judges a model on several periods,
each after the rows that it was trained on. Vocabularies and statistics stay those of all training rows, so that
ids of the period after an origin may have rows in tables, which are untrained then.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from dhen.errors import UserError
from trials.data.cache import VERSION, PreparedLog, Split
from trials.data.example_weights import example_weights
from trials.data.prepare.locked_directory import built, locked
from trials.data.prepare.npy import NpyWriter
from trials.user_cache import use, user_cache

JOINED = ("train", "validation")
"""Splits whose rows are joined, in this order."""
CHUNK_ROWS = 1 << 18
"""Number of rows that are copied at a time."""


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
        return _part(super().split("train"), name, first, last, self.schema.negative_sampling_rate)


class LogWithValidation(PreparedLog):
    """A prepared log whose training rows are those of training and, after them, those of validation.

    Validation is there as well, as it was: what is measured on it says nothing of rows that are not trained on.
    Vocabularies and statistics stay those of the training rows. The joined rows are files beside other prepared
    logs (`trials.user_cache`), written by the first training that needs them and mapped by all.
    """

    def __init__(self, log: PreparedLog) -> None:
        """The log with its rows joined.

        Raises:
            UserError: where they cannot be written, for want of room for instance.
        """
        rows = log.manifest.rows
        joined = rows["train"] + rows["validation"]
        parts = [log.split(name) for name in JOINED]
        weights = [example_weights(part, log.schema.negative_sampling_rate) for part in parts]
        of_part = [
            float(part.rows if weight is None else weight.sum())
            for part, weight in zip(parts, weights, strict=True)
        ]
        base_rate = float(np.average([part.base_rate for part in parts], weights=of_part))
        known = log.manifest.replace(
            rows=rows | {"train": joined}, base_rate=log.manifest.base_rate | {"train": base_rate}
        )
        super().__init__(log.directory, known)
        self._joined = _joined_rows(log)

    def folder_of(self, name: str) -> Path:
        """Returns the folder of the arrays of a split."""
        return self._joined if name == "train" else super().folder_of(name)


def _joined_rows(log: PreparedLog) -> Path:
    """Returns the folder of the arrays of both splits, one after the other; written where it is not there."""
    folder = user_cache() / f"{log.fingerprint}.{VERSION}.{'+'.join(JOINED)}"
    first, second = (log.folder_of(name) for name in JOINED)
    use(folder)
    if folder.is_dir():
        return folder
    with locked(folder):
        if not folder.is_dir():
            files = sorted(first.glob("*.npy"))
            needed = sum(part.stat().st_size for file in files for part in (file, second / file.name))
            with built(folder, needed) as partial:
                for file in files:
                    _join(file, second / file.name, partial / file.name)
        use(folder)
    return folder


def _join(first: Path, second: Path, out: Path) -> None:
    """Writes the rows of two arrays, one after the other; what says where bags begin goes on counting."""
    arrays = [np.load(file, mmap_mode="r", allow_pickle=False) for file in (first, second)]
    offsets = first.stem.endswith("_offsets")
    writer = NpyWriter(out, arrays[0].dtype, arrays[0].shape[1:])
    for array, skipped, added in zip(arrays, (0, offsets), (0, arrays[0][-1] if offsets else 0), strict=True):
        for start in range(skipped, len(array), CHUNK_ROWS):
            rows = array[start : start + CHUNK_ROWS]
            writer.append(rows + added if offsets else rows)
    writer.close()


def origins_of(log: PreparedLog, count: int) -> list[int]:
    """Returns the origins of so many periods before validation, as long as it is, the latest first.

    Of periods whose training rows would be fewer than half of all, none is returned.
    """
    train, period = log.manifest.rows["train"], log.manifest.rows["validation"]
    origins = (train - number * period for number in range(1, count + 1))
    return [origin for origin in origins if 2 * origin >= train]


def check_origins(log: PreparedLog, count: int) -> None:
    """Raises UserError where so many periods before validation cannot be judged on the log."""
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


def _part(split: Split, name: str, first: int, last: int, rate: float) -> Split:
    rows = slice(first, last)
    part = Split(
        name=name,
        labels=split.labels[rows],
        inputs=split.inputs.slice(first, last),
        weight=None if split.weight is None else split.weight[rows],
        oracle=None if split.oracle is None else split.oracle[rows],
        timestamp=None if split.timestamp is None else split.timestamp[rows],
        base_rate=split.base_rate,
        chronological=split.chronological,
    )
    base_rate = float(np.average(part.labels, weights=example_weights(part, rate)))
    return dataclasses.replace(part, base_rate=base_rate)
