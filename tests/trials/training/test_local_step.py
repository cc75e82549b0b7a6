"""A training step: the same as plain PyTorch in fp32, fp32 master weights under bf16, lazy decay settled."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.data.loader import LabelledBatch
from trials.optim.adamw import MasterWeights, compute_in, dense_parameters
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.records.job import TrainingConfig
from trials.training.checkpoint_files import VectorLoadPlanner, VectorSavePlanner
from trials.training.distributed import ddp
from trials.training.schedule import rate_factors
from trials.training.step import TrainStep

ROWS = 24
SCHEMA = FeatureSchema(
    tables=(Table(name="a", rows=40), Table(name="m", rows=9, multi_hot=True, mean_ids=1.0)),
    numeric=("x", "y"),
)
MODEL = parse_model(
    {
        "embedding_dim": 8,
        "layers": [{"modules": ["dcn_v2", "attention", "mlp"], "out_embeddings": 2, "raw_numeric": True}] * 2,
        "dropout": 0.0,
    },
    "test",
)


def batches(count: int) -> list[LabelledBatch]:
    torch.manual_seed(1)
    return [
        LabelledBatch(
            features=FeatureBatch(
                ids_BT=torch.randint(0, 40, (ROWS, 1)),
                bags=((torch.randint(0, 9, (ROWS,)), torch.arange(ROWS)),),
                numeric_BK=torch.randn(ROWS, 2),
            ),
            label_B=torch.randint(0, 2, (ROWS,)).float(),
            weight_B=torch.rand(ROWS) + 0.5,
        )
        for _ in range(count)
    ]


def config(**changes: object) -> TrainingConfig:
    settings = {"precision": "fp32", "weight_decay": 0.01, "learning_rate": 0.01} | changes
    return TrainingConfig.model_validate(settings).resolved(1000, "fp32")


def model(config: ModelConfig = MODEL) -> nn.Module:
    torch.manual_seed(0)
    return build_model(config, SCHEMA).train()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_fp32_is_plain_pytorch(clip_norm: float | None) -> None:
    """One tensor for all dense weights and a plain optimizer over many give the same losses."""
    step, peer, norms = TrainStep(model(), config(clip_norm=clip_norm)), model(), []
    dense = torch.optim.AdamW(dense_parameters(peer).values(), lr=0.01, weight_decay=0.01)
    tables = [p for name, p in peer.named_parameters() if name not in dense_parameters(peer)]
    sparse = RowWiseAdagrad(tables, lr=config().embedding_learning_rate)
    for batch in batches(10):
        loss = F.binary_cross_entropy_with_logits(peer(batch.features), batch.label_B, batch.weight_B)
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(dense_parameters(peer).values(), clip_norm or math.inf))
        dense.step()
        sparse.step()
        torch.testing.assert_close(step(batch), loss.detach(), rtol=1e-4, atol=1e-5)
    for name, weight in step.weights().items():
        torch.testing.assert_close(weight, peer.state_dict()[name], rtol=1e-2, atol=2e-3)
    assert min(norms) < 0.5 < max(norms)


def test_clipped_gradients_are_as_long_as_was_asked_for() -> None:
    """AdamW's first moment is a tenth of the first gradient; tables move as they would have."""
    long, clipped = (TrainStep(model(), config(clip_norm=norm)) for norm in (1e9, 1e-3))
    for step in (long, clipped):
        step(batches(1)[0])
    lengths = [float(step.dense_state()["exp_avg"].pieces[0].values.norm()) for step in (long, clipped)]
    assert lengths[0] > 0.01
    assert lengths[1] == pytest.approx(0.1 * 1e-3, rel=2e-3)
    assert torch.equal(table(long), table(clipped))


def test_bf16_keeps_fp32_master_weights() -> None:
    """Updates too small for bf16 add up; what is computed with is the master weights, rounded."""
    step = TrainStep(model(), config(precision="bf16", learning_rate=1e-5, weight_decay=0.0))
    before = step.weights()
    for batch in batches(8):
        step(batch)
    after, computing = step.weights(), dense_parameters(step.model)
    moved = [(after[name] != before[name]).float().mean().item() for name in computing]
    assert min(moved) > 0.3
    assert all(after[name].dtype is torch.float32 for name in after)
    for name, parameter in computing.items():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter.detach(), after[name].bfloat16())


@pytest.mark.parametrize(("precision", "members"), [("fp32", 3), ("bf16", 1)])
def test_weights_restore_what_was_trained(precision: str, members: int) -> None:
    several = MODEL.replace(members=members)
    step = TrainStep(model(several), config(precision=precision))
    for batch in batches(3):
        step(batch)
    restored = build_model(several, SCHEMA).eval()
    restored.load_state_dict(step.weights())
    compute_in(restored, precision)  # type: ignore[arg-type]
    step.model.eval()
    features = batches(1)[0].features
    assert torch.equal(restored(features), step.model(features))


def test_table_decay_reaches_rows_that_were_not_looked_up() -> None:
    step = TrainStep(model(), config(table_decay=0.5, embedding_learning_rate=0.1))
    before = table(step)
    given = batches(2)
    for batch in given:
        step(batch)
    looked_up = torch.cat([b.features.ids_BT.flatten() for b in given]).unique()
    never = [row for row in range(40) if row not in looked_up.tolist()]
    assert never
    step.settle()
    torch.testing.assert_close(table(step)[never], before[never] * (1 - 0.1 * 0.5) ** 2)


def test_bf16_moments_follow_fp32() -> None:
    losses: dict[str, list[Tensor]] = {}
    for precision in ("fp32", "bf16"):
        step = TrainStep(model(), config(optimizer_precision=precision))
        losses[precision] = [step(batch) for batch in batches(10)]
    torch.testing.assert_close(losses["bf16"], losses["fp32"], rtol=1e-2, atol=3e-3)
    assert losses["bf16"] != losses["fp32"]


def test_the_dense_learning_rate_is_scaled_to_the_batch() -> None:
    for scaling, times in (("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)):
        large = config(learning_rate_scaling=scaling, batch_size=256, reference_batch_size=64)
        assert TrainStep(model(), large).scale_learning_rates(0.5, 0.5) == pytest.approx(0.5 * times * 0.01)


def test_a_warm_up_is_of_the_dense_part_alone() -> None:
    warm = config().replace(warmup_examples=4 * ROWS, batch_size=ROWS)
    assert rate_factors(warm, ROWS, 0.5, 100 * ROWS) == pytest.approx((0.5 * 2 / 4, 0.5))
    assert rate_factors(warm, 4 * ROWS, 0.5, 100 * ROWS) == (0.5, 0.5)


def test_a_warm_up_ends_before_the_training_does() -> None:
    with pytest.raises(UserError, match=r"warmup_examples=2001 .*epochs=2 over 1000 examples are 2000"):
        config(warmup_examples=2001, epochs=2)
    assert config(warmup_examples=2000, epochs=2).warmup_examples == 2000


def test_without_learning_rates_nothing_changes_and_a_weight_that_is_not_finite_is_noticed() -> None:
    step = TrainStep(model(), config(learning_rate=0.01))
    before = step.weights()
    assert step.scale_learning_rates(0.0, 0.0) == 0.0
    step(batches(1)[0])
    after = step.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert step.is_finite()
    next(iter(dense_parameters(step.model).values())).data.view(-1)[5] = float("nan")
    assert not step.is_finite()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("from_gpu", [True, False])
def test_a_checkpoint_goes_on_where_weights_are_aligned_otherwise(
    from_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights on a GPU begin at multiples of 16 bytes; what is saved has no gaps."""
    one, other = TrainStep(model(), config()), TrainStep(model(), config())
    with monkeypatch.context() as patch:
        patch.setattr(
            ddp,
            "MasterWeights",
            lambda model, precision, aligned: MasterWeights(model, precision, aligned=True),
        )
        on_gpu = TrainStep(model(), config())
    assert len(on_gpu.dense_state()["weight"].pieces) > len(one.dense_state()["weight"].pieces)
    begins, goes_on = (on_gpu, other) if from_gpu else (other, on_gpu)
    for batch in batches(3):
        assert torch.equal(begins(batch), one(batch))
    dcp.save(begins.dense_state(), checkpoint_id=tmp_path, planner=VectorSavePlanner(), no_dist=True)
    tables = {name: tensor.clone() for name, tensor in begins.table_state().items()}
    dcp.load(goes_on.dense_state(), checkpoint_id=tmp_path, planner=VectorLoadPlanner(), no_dist=True)
    for name, tensor in goes_on.table_state(tables.keys()).items():
        tensor.copy_(tables[name])
    goes_on.restored(tables, 3)
    for batch in batches(6)[3:]:
        assert torch.equal(goes_on(batch), one(batch))


def table(step: TrainStep) -> Tensor:
    return step.weights()["features.tables.weight"].clone()
