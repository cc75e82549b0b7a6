"""The weight of an example: the one rule behind base rates and normalized entropy.

An example counts by its weight column, and a negative of a down-sampled log stands for the 1 / rate
negatives it was drawn from, so that base rate and NE describe the log before down-sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trials.metrics import entropy, log_loss

Floats = NDArray[np.float64]


class Weighted(Protocol):
    """Rows with labels (N) in {0, 1} and weights (N) or None: a `Split`, or some rows of one."""

    @property
    def labels(self) -> NDArray[np.float32]:
        """Label per example, 0 or 1."""

    @property
    def weight(self) -> NDArray[np.float32] | None:
        """The weight column, if the log has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedRows:
    """Some rows: labels (N), weights (N) or None, true probabilities (N) or None."""

    labels: NDArray[np.float32]
    weight: NDArray[np.float32] | None = None
    oracle: Floats | None = None


def example_weights(rows: Weighted, negative_sampling_rate: float) -> Floats | None:
    """Returns how much each example counts (N), or None where all count the same."""
    if negative_sampling_rate == 1.0:
        return None if rows.weight is None else np.asarray(rows.weight, dtype=np.float64)
    counts = np.where(np.asarray(rows.labels) > 0.5, 1.0, 1.0 / negative_sampling_rate)
    return counts if rows.weight is None else counts * rows.weight


class ClickTotals:
    """Running sums over the rows of a split, from which its base rate and NE floor follow."""

    def __init__(self, negative_sampling_rate: float) -> None:
        self._rate = negative_sampling_rate
        self.rows = 0
        self.positive_rows = 0
        self._weight = 0.0
        self._positive_weight = 0.0
        self._oracle_loss = 0.0

    def add(self, rows: WeightedRows) -> None:
        """Takes in more rows of the split."""
        label = rows.labels.astype(np.float64)
        if not len(label):
            return
        weights = example_weights(rows, self._rate)
        weight: Floats = np.ones_like(label) if weights is None else weights
        self.rows += len(label)
        self.positive_rows += int(label.sum())
        self._weight += float(weight.sum())
        self._positive_weight += float(np.dot(weight, label))
        if rows.oracle is not None and weight.any():
            self._oracle_loss += log_loss(rows.oracle, label, weight) * float(weight.sum())

    @property
    def base_rate(self) -> float:
        """Weighted fraction of positives."""
        return self._positive_weight / self._weight if self._weight else float("nan")

    @property
    def ne_floor(self) -> float:
        """NE of the true probabilities: mean log loss over the entropy of the base rate."""
        return self._oracle_loss / self._weight / entropy(self.base_rate)
