"""How examples of the demo log are drawn, before labels.

Columns are independent of each other, so that interactions of different orders are uncorrelated and the
share of each in the logit's variance is well defined. Only the time stamp and the click counter `I13`
go together: the counter reports a slow drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from trials.data.demo.columns import (
    CATEGORICAL,
    COUNTER,
    COUNTER_WINDOW,
    COUNTS,
    MULTI_HOT,
    CountColumn,
    IdColumn,
    zipf,
)
from trials.data.demo.spec import DAYS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

START = np.datetime64("2024-01-01T00:00:00", "s")
"""First moment of the log, a Monday."""
MISSING = -1
"""Mark of a missing value among ids and counts, which are never negative."""
MAX_IDS = 10
"""Largest number of ids in a bag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """B examples, whose ids are still popularity ranks."""

    seconds_B: Ints
    """Seconds since `START`, in order."""
    ids: dict[str, Ints]
    """Ids by categorical column, shape [B]; `MISSING` where missing. Those of users and items are numbers that
    count through all who ever come."""
    bags: dict[str, tuple[Ints, Ints]]
    """Bags by multi-hot column: ids of all examples one after another, and B + 1 offsets."""
    counts: dict[str, Ints]
    """Counts by numeric column, shape [B]; `MISSING` where missing."""

    @property
    def hours(self) -> Ints:
        """Hour of day, 0 to 23, shape [B]."""
        return self.seconds_B // 3600 % 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The path of the base rate over the ten days: smooth, a sum of waves."""

    periods_days: Floats
    phases: Floats

    @classmethod
    def draw(cls, rng: Generator) -> Drift:
        """Draws three waves with periods of two to seven days."""
        return cls(periods_days=rng.uniform(2.0, 7.0, 3), phases=rng.uniform(0.0, 2 * np.pi, 3))

    def at(self, seconds_B: Ints) -> Floats:
        """Returns the path at these times, of about unit variance, shape [B]."""
        angle_WB = 2 * np.pi * seconds_B / 86_400 / self.periods_days[:, None] + self.phases[:, None]
        path_B: Floats = np.sqrt(2 / len(angle_WB)) * np.sin(angle_WB).sum(axis=0)
        return path_B


def draw_examples(rng: Generator, drift: Drift, base_rate: float, position_B: Floats) -> Examples:
    """Draws B examples at increasing `position_B`, the fraction (0 to 1) of all impressions that went before."""
    size = len(position_B)
    seconds_B = _seconds(position_B)
    counts = {column.name: _counts(rng, column, size) for column in COUNTS}
    counts[COUNTER] = _clicks(rng, base_rate, drift.at(seconds_B))
    return Examples(
        seconds_B=seconds_B,
        counts=counts,
        ids={column.name: _ids(rng, column, size) for column in CATEGORICAL},
        bags={column.name: _bags(rng, column, size) for column in MULTI_HOT},
    )


def _seconds(position_B: Floats) -> Ints:
    """Returns times by which these fractions of all impressions have gone by: busiest at 18 h, quietest at 6 h."""
    hours = np.arange(DAYS * 24 + 1)
    traffic = 1.0 + 0.6 * np.sin(2 * np.pi * (hours[:-1] % 24 - 11.5) / 24)
    passed = np.concatenate([[0.0], np.cumsum(traffic)])
    seconds_B: Ints = (np.interp(position_B, passed / passed[-1], hours) * 3600).astype(np.int64)
    return seconds_B


def _counts(rng: Generator, column: CountColumn, size: int) -> Ints:
    values_B = np.floor(rng.lognormal(np.log(column.median), column.spread, size)).astype(np.int64)
    return _with_missing(rng, column.missing, values_B)


def _clicks(rng: Generator, base_rate: float, drift_B: Floats) -> Ints:
    """Returns clicks in the window before each example; by default the base rate itself moves about as far."""
    odds_B = base_rate / (1 - base_rate) * np.exp(0.2 * drift_B)
    return rng.binomial(COUNTER_WINDOW, odds_B / (1 + odds_B))


def _ids(rng: Generator, column: IdColumn, size: int) -> Ints:
    return _with_missing(rng, column.missing, draw_ranks(rng, column, size))


def _bags(rng: Generator, column: IdColumn, size: int) -> tuple[Ints, Ints]:
    """Draws bags of about three ids (geometric); an id may come more than once, as in a list of recent visits."""
    lengths_B = np.minimum(rng.geometric(0.3, size), MAX_IDS)
    lengths_B[rng.random(size) < column.missing] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths_B)])
    return draw_ranks(rng, column, int(offsets[-1])), offsets


def _with_missing(rng: Generator, fraction: float, values_B: Ints) -> Ints:
    return np.where(rng.random(len(values_B)) < fraction, MISSING, values_B)


def draw_ranks(rng: Generator, column: IdColumn, size: int) -> Ints:
    """Draws Zipf-distributed ids, shape [size], by inversion of the cumulative distribution."""
    return np.searchsorted(_cumulative(column), rng.random(size), side="right")


@cache
def _cumulative(column: IdColumn) -> Floats:
    cumulative = np.cumsum(zipf(column))
    cumulative_I: Floats = cumulative / cumulative[-1]
    return cumulative_I
