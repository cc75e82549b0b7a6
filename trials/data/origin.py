"""A log as it stood earlier: training rows before an origin, and the period after it in place of validation.

Rolling-origin evaluation (Tashman, International Journal of Forecasting 2000) judges a model on several periods,
each after the rows that it was trained on. Vocabularies and statistics stay those of all training rows, so that
ids of the period after an origin may have rows in tables, which are untrained then.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dhen.errors import UserError
from trials.data.cache import PreparedLog, Split
from trials.data.example_weights import example_weights


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
