"""The mean of several networks' predictions, in logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dhen.members import mean_logit, mean_of_logits
from trials.records.metrics import undo_negative_sampling


@pytest.mark.parametrize("rate", [1.0, 0.05])
def test_mean_of_corrected_predictions(rate: float) -> None:
    logits = [np.random.default_rng(seed).normal(0, 3, 100).astype(np.float32) for seed in range(3)]
    p = [undo_negative_sampling(1.0 / (1.0 + np.exp(-z.astype(np.float64))), rate) for z in logits]
    mean_N = mean_of_logits(logits, rate)
    found = undo_negative_sampling(1.0 / (1.0 + np.exp(-mean_N.astype(np.float64))), rate)
    assert found == pytest.approx(np.mean(p, axis=0), rel=1e-5)


def test_far_logits_stay_finite() -> None:
    one, other = torch.tensor([200.0, -200.0, 200.0]), torch.tensor([200.0, -200.0, -200.0])
    assert mean_logit([one, other], 1.0).tolist() == pytest.approx([200.0, -200.0, 0.0])
