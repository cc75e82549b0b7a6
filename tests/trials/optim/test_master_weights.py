"""Master weights: where a rank has none (a stage of a pipeline may be modules without weights), and aligned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trials.cluster.machine import Precision
from trials.optim.adamw import MasterWeights, adamw, all_finite, moments
from trials.records.job import TrainingConfig


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_aligned_weights_train_as_others_and_begin_at_multiples_of_16_bytes(precision: Precision) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 8))

    models = made(), made()
    plain, aligned = (
        MasterWeights(model, precision, aligned=wanted)
        for model, wanted in zip(models, (False, True), strict=True)
    )
    assert plain.ranges == [(0, slice(0, 42))]
    assert [start for start, _ in aligned.ranges] == [0, 15, 20, 25, 26, 34]
    assert aligned.length == plain.length == 42
    assert len(aligned.flat) > 42
    places = {parameter.data_ptr() % 16 for parameter in models[1].parameters()}
    assert places == {models[1][0].weight.data_ptr() % 16}
    config = TrainingConfig(precision=precision).resolved(1000, precision)
    for held, model in zip((plain, aligned), models, strict=True):
        optimizer = adamw([held.flat], config)
        for _ in range(3):
            x = torch.ones(2, 3, dtype=model[0].weight.dtype)
            model(x).float().square().sum().backward()
            held.gather_gradients()
            optimizer.step()
            held.publish()
        assert all(parameter.grad is None for parameter in model.parameters())
    for mine, theirs in zip(plain.weights().values(), aligned.weights().values(), strict=True):
        assert torch.equal(mine, theirs)
    whole = torch.cat([aligned.flat[place] for _, place in aligned.ranges])
    assert torch.equal(whole, plain.flat)
    assert aligned.flat.count_nonzero() <= 42, "what lies between stays zero"
