"""A batch in micro-batches has the gradients that it has at once, also where it has fewer examples than those."""

from __future__ import annotations

import pytest
import torch

from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.training.distributed.engine import DenseBatch, DenseInputs
from trials.training.distributed.parallelize import parallelize

SCHEMA = FeatureSchema(tables=(), numeric=("a", "b"))
MODEL = parse_model({"embedding_dim": 4, "layers": [{"modules": ["mlp"]}], "dropout": 0.0}, "test")


def gradients(examples: int, micro_batches: int) -> list[torch.Tensor]:
    """The loss of a batch, and the gradients of all weights."""
    torch.manual_seed(0)
    model = build_model(MODEL, SCHEMA).train()
    config = TrainingConfig(precision="fp32", batch_size=8, epochs=1).resolved(80, "fp32")
    step = parallelize(model, Strategy(micro_batches=micro_batches), config)
    numeric_BK, label_B = torch.randn(examples, 2), torch.tensor([1.0, 0.0, 1.0])[:examples]
    loss = step.forward_backward(DenseBatch(DenseInputs((), numeric_BK), label_B, None))
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_fewer_examples_than_micro_batches(examples: int) -> None:
    at_once, apart = gradients(examples, 1), gradients(examples, 4)
    assert len(at_once) == len(apart) > 1
    for one, other in zip(at_once, apart, strict=True):
        assert torch.isfinite(other).all()
        assert torch.allclose(one, other, atol=1e-6)
