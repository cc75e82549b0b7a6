"""One rank by itself under techniques that are made for several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.training.distributed.engine import DenseBatch, DenseInputs
from trials.training.distributed.parallelize import device_mesh, parallelize
from trials.training.distributed.zero import Bucket, Group

SCHEMA = FeatureSchema(tables=(), numeric=("a", "b"))
MODEL = parse_model({"embedding_dim": 4, "layers": [{"modules": ["mlp"]}], "dropout": 0.0}, "test")


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("offload", [False, True])
def test_weights_are_a_copy_that_later_steps_leave_alone(offload: bool) -> None:
    """They are the best ones until a later evaluation is better."""
    torch.manual_seed(0)
    config = TrainingConfig(precision="fp32", batch_size=8, epochs=1).resolved(80, "fp32")
    strategy = Strategy(dense="fsdp", offload=offload)
    model = build_model(MODEL, SCHEMA).train()
    step = parallelize(model, strategy, config, device_mesh("fsdp", 1, 1, "cpu"))
    batch = DenseBatch(DenseInputs((), torch.randn(8, 2)), torch.ones(8), None)
    step.forward_backward(batch)
    step.update()
    weights = step.engine.weights()
    before = {name: weight.clone() for name, weight in weights.items()}
    step.forward_backward(batch)
    step.update()
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())
    assert any(not torch.equal(step.engine.weights()[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(("length", "ranks"), [(7, 3), (8, 4), (3, 4), (5, 1)])
def test_every_weight_of_a_bucket_has_one_owner(length: int, ranks: int) -> None:
    """As each of the ranks sees it; a part that is longer than what is left of the bucket is padded."""
    buckets = [
        Bucket(
            [nn.Parameter(part) for part in torch.arange(float(length)).split(2)],
            torch.float32,
            Group(None, rank, ranks),
        )
        for rank in range(ranks)
    ]
    owned = [place for bucket in buckets for place in range(bucket.begin, bucket.begin + bucket.owned)]
    masters = torch.cat([bucket.master.detach()[: bucket.owned] for bucket in buckets])
    assert owned == masters.tolist() == list(range(length))
