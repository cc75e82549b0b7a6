"""Metrics against definitions written out naively, and the properties users rely on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.records.metrics import auc, evaluate_predictions, log_loss, undo_negative_sampling


def example(seed: int, n: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = rng.integers(1, 20, n) / 20.0  # many ties
    label = (rng.random(n) < p).astype(np.float64)
    label[:2] = 0.0, 1.0
    return p, label, rng.integers(1, 5, n).astype(np.float64)


def naive_auc(p: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    above = total = 0.0
    for i in np.flatnonzero(label == 1):
        for j in np.flatnonzero(label == 0):
            pair = weight[i] * weight[j]
            total += pair
            above += pair * (1.0 if p[i] > p[j] else 0.5 if p[i] == p[j] else 0.0)
    return above / total


@given(st.integers(0, 1000))
def test_auc_counts_pairs(seed: int) -> None:
    p, label, weight = example(seed, n=40)
    assert auc(p, label, weight) == pytest.approx(naive_auc(p, label, weight), abs=1e-12)


@given(st.integers(0, 1000))
def test_a_weight_is_that_many_examples(seed: int) -> None:
    p, label, weight = example(seed)
    times = weight.astype(int)
    repeated = evaluate_predictions(np.repeat(p, times), np.repeat(label, times))
    weighted = evaluate_predictions(p, label, weight)
    for name in ("ne", "log_loss", "auc", "calibration"):
        assert getattr(weighted, name) == pytest.approx(getattr(repeated, name))


def test_the_base_rate_has_ne_one() -> None:
    _, label, weight = example(0)
    rate = float(np.average(label, weights=weight))
    metrics = evaluate_predictions(np.full_like(label, rate), label, weight)
    assert metrics.ne == pytest.approx(1.0)
    assert metrics.auc == pytest.approx(0.5)
    assert metrics.calibration == pytest.approx(1.0)


def test_calibration_is_predicted_over_clicked() -> None:
    label, weight = np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0, 2.0])
    assert evaluate_predictions(np.full(3, 0.5), label, weight).calibration == pytest.approx(2.0)


def test_certain_mistakes_stay_finite() -> None:
    label = np.array([0.0, 1.0, 1.0])
    assert np.isfinite(log_loss(np.array([1.0, 0.0, 1.0]), label, np.ones(3)))


def test_negative_sampling_is_undone() -> None:
    """A calibrated model of a log that kept 10 % of the negatives, corrected, is calibrated on the whole."""
    rng = np.random.default_rng(0)
    true_p = rng.beta(1, 20, 200_000)
    label = (rng.random(len(true_p)) < true_p).astype(np.float64)
    keep = (label == 1) | (rng.random(len(label)) < 0.1)
    sampled_p = true_p / (true_p + (1 - true_p) * 0.1)
    corrected = undo_negative_sampling(sampled_p, 0.1)
    np.testing.assert_allclose(corrected, true_p, rtol=1e-9)
    weight = np.where(label[keep] == 1, 1.0, 10.0)
    whole = evaluate_predictions(true_p, label)
    estimate = evaluate_predictions(corrected[keep], label[keep], weight)
    assert estimate.ne == pytest.approx(whole.ne, rel=0.02)
    assert estimate.calibration == pytest.approx(1.0, abs=0.05)
