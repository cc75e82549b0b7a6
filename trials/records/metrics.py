"""Quality of predicted click probabilities: normalized entropy, log loss, AUC, calibration.

All exact, over weighted examples, in float64. Normalized entropy is the mean log loss divided by the
entropy of the evaluated split's own base rate (He et al., ADKDD 2014, equation 1): 1 is no better than
the base rate, lower is better.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trials.records.trial_record import Metrics

Floats = NDArray[np.float64]
PROBABILITY_FLOOR = 1e-12
"""Predictions are kept this far from 0 and 1, so that one certain mistake does not make a loss infinite."""


def evaluate_predictions(p: Floats, label: Floats, weight: Floats | None = None) -> Metrics:
    """Returns the metrics of probabilities p (N) for labels in {0, 1} (N) with weights (N), all ones if None.

    NE and AUC of labels that are all equal are NaN, and calibration without a click is infinite.
    """
    weight = np.ones_like(label) if weight is None else weight
    loss = log_loss(p, label, weight)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Metrics(
            ne=loss / entropy(float(np.average(label, weights=weight))),
            log_loss=loss,
            auc=auc(p, label, weight),
            calibration=float(np.dot(p, weight) / np.dot(label, weight)),
            examples=len(label),
        )


def log_loss(p: Floats, label: Floats, weight: Floats) -> float:
    """Returns the weighted mean cross-entropy in nats."""
    p = np.clip(p, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    losses = -np.where(label > 0.5, np.log(p), np.log1p(-p))
    return float(np.average(losses, weights=weight))


def entropy(base_rate: float) -> float:
    """Returns the entropy in nats of a click with probability `base_rate`, strictly between 0 and 1."""
    return float(-base_rate * np.log(base_rate) - (1.0 - base_rate) * np.log1p(-base_rate))


def auc(p: Floats, label: Floats, weight: Floats) -> float:
    """Returns the probability that a positive is ranked above a negative, ties counting one half; O(N log N)."""
    order = np.argsort(p, kind="stable")
    sorted_p, positive = p[order], weight[order] * label[order]
    negative = weight[order] - positive
    starts = np.flatnonzero(np.concatenate(([True], sorted_p[1:] != sorted_p[:-1])))
    positive_of_tie, negative_of_tie = np.add.reduceat(positive, starts), np.add.reduceat(negative, starts)
    negative_below = np.cumsum(negative_of_tie) - negative_of_tie
    pairs = np.dot(positive_of_tie, negative_below + 0.5 * negative_of_tie)
    return float(pairs / (positive.sum() * negative.sum()))


def undo_negative_sampling(p: Floats, rate: float) -> Floats:
    """Returns probabilities in the log before down-sampling, q = p / (p + (1 - p) / rate) (He et al. 2014, section
    6.3).

    `rate` is the fraction of negatives that were kept; at 1 nothing changes.
    """
    return p if rate == 1.0 else p / (p + (1.0 - p) / rate)


# The weight of an example: the one rule behind base rates and normalized entropy.
#
# An example counts by its weight column, and a negative of a down-sampled log stands for the 1 / rate
# negatives it was drawn from, so that base rate and NE describe the log before down-sampling.


def example_weights(
    labels: NDArray[np.float32], weight: NDArray[np.float32] | None, negative_sampling_rate: float
) -> Floats | None:
    """Returns how much each example counts (N), by its label, 0 or 1 (N), and by the weight column (N), if the log
    has one; None if all count the same."""
    if negative_sampling_rate == 1.0:
        return None if weight is None else np.asarray(weight, dtype=np.float64)
    counts = np.where(np.asarray(labels) > 0.5, 1.0, 1.0 / negative_sampling_rate)
    return counts if weight is None else counts * weight


class ClickTotals:
    """Running sums over the rows of a split, from which its base rate and NE floor follow."""

    def __init__(self, negative_sampling_rate: float) -> None:
        self._rate = negative_sampling_rate
        self.rows = 0
        self.positive_rows = 0
        self._weight = 0.0
        self._positive_weight = 0.0
        self._oracle_loss = 0.0

    def add(
        self,
        labels: NDArray[np.float32],
        weight_column: NDArray[np.float32] | None = None,
        oracle: Floats | None = None,
    ) -> None:
        """Takes in more rows of the split: labels (N), weights (N), true probabilities (N), if there are any."""
        label = labels.astype(np.float64)
        if not len(label):
            return
        weights = example_weights(labels, weight_column, self._rate)
        weight: Floats = np.ones_like(label) if weights is None else weights
        self.rows += len(label)
        self.positive_rows += int(label.sum())
        self._weight += float(weight.sum())
        self._positive_weight += float(np.dot(weight, label))
        if oracle is not None and weight.any():
            self._oracle_loss += log_loss(oracle, label, weight) * float(weight.sum())

    @property
    def base_rate(self) -> float:
        """Weighted fraction of positives."""
        return self._positive_weight / self._weight if self._weight else float("nan")

    @property
    def ne_floor(self) -> float:
        """NE of the true probabilities: mean log loss over the entropy of the base rate."""
        return self._oracle_loss / self._weight / entropy(self.base_rate)
