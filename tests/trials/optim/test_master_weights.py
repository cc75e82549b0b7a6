"""Master weights where a rank has none: a pipeline's stage may be modules without weights."""

from __future__ import annotations

import pytest
from torch import nn

from trials.cluster.machine import Precision
from trials.job import TrainingConfig
from trials.optim.adamw import adamw, moments
from trials.optim.master_weights import MasterWeights, all_finite


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_has_no_weights_trains(precision: Precision) -> None:
    held = MasterWeights(nn.Identity(), precision)
    optimizer = adamw([held.flat], TrainingConfig(precision=precision).resolved(1000, precision))
    for _ in range(2):
        held.gather_gradients()
        optimizer.step()
        optimizer.zero_grad()
        held.publish()
    assert all(not len(moment) for moment in moments(optimizer, held.flat).values())
    assert all_finite(held.flat)
    assert held.weights() == {}
