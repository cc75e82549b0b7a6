"""The columns of the demo log: 13 counts and 26 categorical columns as in Criteo, and two multi-hot ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

HEAD = 100
"""Number of ids of a column that have effects of their own; all rarer ids share one, as no model could learn
theirs."""
COUNTER = "I13"
"""The count that reports the drift: clicks among the last `COUNTER_WINDOW` impressions."""
COUNTER_WINDOW = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdColumn:
    """A column of ids that are popularity ranks: 0 is the most frequent, rank r has a probability ~ (r + 1) **
    -exponent."""

    name: str
    cardinality: int
    exponent: float
    missing: float = 0.0
    """Fraction of missing values (of empty bags, where multi-hot)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountColumn:
    """A log-normal count, rounded down: draws below 1 become exact zeros, which are not missing."""

    name: str
    median: float
    """Median of the count before it is rounded."""
    spread: float
    """Standard deviation of the count's logarithm."""
    missing: float = 0.0
    """Fraction of missing values."""


_CARDINALITY = {
    "C1": 40, "C2": 100_000, "C3": 100, "C4": 4, "C5": 12, "C6": 3_000, "C7": 24, "C8": 500, "C9": 60,
    "C10": 50_000, "C11": 16, "C12": 300, "C13": 80, "C14": 12_000, "C15": 32, "C16": 1_000, "C17": 8,
    "C18": 80_000, "C19": 50, "C20": 6_000, "C21": 20, "C22": 25_000, "C23": 28, "C24": 1_500, "C25": 64,
    "C26": 10,
}  # fmt: skip
_MISSING = {"C3": 0.03, "C12": 0.03, "C19": 0.44, "C22": 0.76, "C25": 0.44}

CATEGORICAL = tuple(
    IdColumn(
        name=name, cardinality=size, exponent=1.0 if size <= HEAD else 1.2, missing=_MISSING.get(name, 0.0)
    )
    for name, size in _CARDINALITY.items()
)
MULTI_HOT = (
    IdColumn(name="M1", cardinality=400, exponent=0.9, missing=0.1),
    IdColumn(name="M2", cardinality=5_000, exponent=1.1, missing=0.3),
)
COUNTS = (
    CountColumn(name="I1", median=2, spread=1.2, missing=0.45),
    CountColumn(name="I2", median=3, spread=2.4),
    CountColumn(name="I3", median=8, spread=1.8, missing=0.21),
    CountColumn(name="I4", median=5, spread=1.1, missing=0.21),
    CountColumn(name="I5", median=3_000, spread=2.2, missing=0.03),
    CountColumn(name="I6", median=40, spread=1.7, missing=0.22),
    CountColumn(name="I7", median=4, spread=1.8, missing=0.04),
    CountColumn(name="I8", median=8, spread=1.2),
    CountColumn(name="I9", median=50, spread=1.6, missing=0.04),
    CountColumn(name="I10", median=1, spread=1.5, missing=0.45),
    CountColumn(name="I11", median=1.5, spread=1.4, missing=0.04),
    CountColumn(name="I12", median=0.6, spread=1.6, missing=0.76),
)
"""All counts except the `COUNTER`."""


@cache
def zipf(column: IdColumn) -> NDArray[np.float64]:
    """Returns the probability of each id where the value is not missing, shape [cardinality]."""
    weight = np.power(1.0 + np.arange(column.cardinality), -column.exponent)
    probability: NDArray[np.float64] = weight / weight.sum()
    return probability
