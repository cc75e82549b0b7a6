"""A model whose tables are in fp16 trains like one in fp32, and is saved as what it computes with."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.data.loader import LabelledBatch
from trials.records.job import TrainingConfig
from trials.training.embeddings.blocks import HalfTables
from trials.training.step import TrainStep

ROWS = 32
SCHEMA = FeatureSchema(
    tables=(Table(name="a", rows=40), Table(name="m", rows=9, multi_hot=True, mean_ids=2.0)), numeric=("x",)
)
MODEL = parse_model({"embedding_dim": 6, "layers": [{"modules": ["dcn_v2"], "out_embeddings": 2}]}, "test")


def batch(number: int) -> LabelledBatch:
    generator = torch.Generator().manual_seed(number)
    ids_B1 = torch.randint(0, 40, (ROWS, 1), generator=generator)
    bag = (torch.randint(0, 9, (2 * ROWS,), generator=generator), torch.arange(0, 2 * ROWS, 2))
    features = FeatureBatch(ids_BT=ids_B1, bags=(bag,), numeric_BK=torch.randn(ROWS, 1, generator=generator))
    return LabelledBatch(features=features, label_B=ids_B1[:, 0].remainder(2).float(), weight_B=None)


def step(table_precision: Literal["fp32", "fp16"], table_decay: float = 0.0) -> TrainStep:
    torch.manual_seed(0)
    config = TrainingConfig(table_precision=table_precision, table_decay=table_decay, precision="fp32")
    return TrainStep(build_model(MODEL, SCHEMA).train(), config.resolved(1000, "fp32"))


def losses(step: TrainStep, numbers: range) -> Tensor:
    return torch.stack([step(batch(number)) for number in numbers])


@pytest.mark.parametrize("table_decay", [0.0, 0.1])
def test_losses_follow_those_of_fp32_tables(table_decay: float) -> None:
    exact = losses(step("fp32", table_decay), range(60))
    half = losses(step("fp16", table_decay), range(60))
    assert exact[-10:].mean() < 0.8 * exact[:10].mean(), "it learns"
    torch.testing.assert_close(half, exact, rtol=0, atol=3e-3)
    assert not torch.equal(half, exact)


def test_saved_weights_are_fp32_and_score_as_the_model_that_trained() -> None:
    trained = step("fp16")
    losses(trained, range(5))
    weights = trained.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    served = build_model(MODEL, SCHEMA).eval()
    served.load_state_dict(weights)
    features = batch(7).features
    with torch.no_grad():
        assert torch.equal(served(features), trained.model.eval()(features))


def test_gradients_are_fp32_where_fp16_has_none_so_small() -> None:
    trained = step("fp16")
    (tables,) = (module for module in trained.model.modules() if isinstance(module, HalfTables))
    (1e-9 * sum(e.sum() for e in tables(batch(0).features))).backward()
    assert tables.weight.grad.dtype == torch.float32
    assert tables.weight.grad.to_dense().max() > 0
