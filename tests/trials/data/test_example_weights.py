from __future__ import annotations

import numpy as np
import pytest

from trials.records.metrics import ClickTotals, evaluate_predictions, example_weights

LABELS = np.array([1, 0, 0, 1, 0], dtype=np.float32)
WEIGHT = np.array([1, 2, 0, 3, 1], dtype=np.float32)


def test_what_an_example_counts() -> None:
    assert example_weights(LABELS, None, 1.0) is None
    assert example_weights(LABELS, WEIGHT, 1.0) == pytest.approx([1, 2, 0, 3, 1])
    assert example_weights(LABELS, None, 0.25) == pytest.approx([1, 4, 4, 1, 4])
    assert example_weights(LABELS, WEIGHT, 0.5) == pytest.approx([1, 4, 0, 3, 2])


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_totals_agree_with_the_metrics(rate: float, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    oracle = rng.uniform(0.05, 0.9, 500)
    labels = (rng.random(500) < oracle).astype(np.float32)
    weight = rng.integers(0, 4, 500).astype(np.float32) if weighted else None
    totals = ClickTotals(rate)
    for rows in np.array_split(np.arange(500), 7):
        totals.add(labels[rows], None if weight is None else weight[rows], oracle[rows])
    counts = example_weights(labels, weight, rate)
    expected = evaluate_predictions(oracle, labels.astype(np.float64), counts)
    assert totals.ne_floor == pytest.approx(expected.ne)
    assert totals.base_rate == pytest.approx(np.average(labels, weights=counts))
    assert (totals.rows, totals.positive_rows) == (500, labels.sum())
