"""An average of weights is their mean, in every precision, and leaves no trace in the training."""

from __future__ import annotations

import pytest
import torch

from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.data.loader import FeatureBatch, LabelledBatch
from trials.records.job import TrainingConfig
from trials.training.step import TrainStep, WeightAverage

SCHEMA = FeatureSchema(tables=(Table(name="a", rows=40),), numeric=("x",))
MODEL = parse_model({"embedding_dim": 8, "layers": [{"modules": ["dcn_v2", "mlp"]}]}, "test")


def batch(seed: int) -> LabelledBatch:
    drawn = torch.Generator().manual_seed(seed)
    return LabelledBatch(
        features=FeatureBatch(
            ids_BT=torch.randint(0, 40, (24, 1), generator=drawn),
            bags=(),
            numeric_BK=torch.randn(24, 1, generator=drawn),
        ),
        label_B=torch.randint(0, 2, (24,), generator=drawn).float(),
        weight_B=torch.ones(24),
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16", "table_precision": "fp16"}, {"table_decay": 0.1}],
    ids=["fp32", "bf16 and fp16 tables", "table decay"],
)
def test_the_mean_is_in_place_for_a_while(settings: dict[str, object]) -> None:
    config = TrainingConfig.model_validate({"learning_rate": 0.05} | settings).resolved(1000, "fp32")
    torch.manual_seed(0)
    step = TrainStep(build_model(MODEL, SCHEMA).train(), config)
    average, seen = WeightAverage(step, 3), []
    for number in range(5):
        step(batch(number))
        step.settle()
        average.note()
        seen.append(step.weights())
    with average.in_place(5):
        mean = step.weights()
        logits_of_mean = step.model(batch(9).features)
    for name, before in seen[-1].items():
        stored = torch.float16 if "tables" in name and "table_precision" in settings else torch.float32
        expected = torch.stack([weights[name] for weights in seen[-3:]]).mean(dim=0).to(stored).float()
        torch.testing.assert_close(mean[name], expected)
        assert torch.equal(step.weights()[name], before), name
    assert not torch.equal(step.model(batch(9).features), logits_of_mean)
