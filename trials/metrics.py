"""Quality of predicted click probabilities: normalized entropy, log loss, AUC, calibration.

All exact, over weighted examples, in float64. Normalized entropy is the mean log loss divided by the
entropy of the evaluated split's own base rate (He et al., ADKDD 2014, equation 1): 1 is no better than
the base rate, lower is better.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trials.record import Metrics

Array = NDArray[np.float64]
PROBABILITY_FLOOR = 1e-12
"""Predictions are kept this far from 0 and 1, so that one certain mistake does not make a loss infinite."""


def evaluate_predictions(p: Array, label: Array, weight: Array | None = None) -> Metrics:
    """Returns the metrics of probabilities p (N) for labels in {0, 1} (N) with weights (N), all ones where None.

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


def log_loss(p: Array, label: Array, weight: Array) -> float:
    """Returns the weighted mean cross-entropy in nats."""
    p = np.clip(p, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    losses = -np.where(label > 0.5, np.log(p), np.log1p(-p))
    return float(np.average(losses, weights=weight))


def entropy(base_rate: float) -> float:
    """Returns the entropy in nats of a click with probability `base_rate`, strictly between 0 and 1."""
    return float(-base_rate * np.log(base_rate) - (1.0 - base_rate) * np.log1p(-base_rate))


def auc(p: Array, label: Array, weight: Array) -> float:
    """Returns the probability that a positive is ranked above a negative, ties counting one half; O(N log N)."""
    order = np.argsort(p, kind="stable")
    sorted_p, positive = p[order], weight[order] * label[order]
    negative = weight[order] - positive
    starts = np.flatnonzero(np.concatenate(([True], sorted_p[1:] != sorted_p[:-1])))
    positive_of_tie, negative_of_tie = np.add.reduceat(positive, starts), np.add.reduceat(negative, starts)
    negative_below = np.cumsum(negative_of_tie) - negative_of_tie
    pairs = np.dot(positive_of_tie, negative_below + 0.5 * negative_of_tie)
    return float(pairs / (positive.sum() * negative.sum()))


def undo_negative_sampling(p: Array, rate: float) -> Array:
    """Returns probabilities in the log before down-sampling, q = p / (p + (1 - p) / rate) (He et al. 2014, section
    6.3).

    `rate` is the fraction of negatives that were kept; at 1 nothing changes.
    """
    return p if rate == 1.0 else p / (p + (1.0 - p) / rate)
