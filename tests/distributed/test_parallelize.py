"""Every way to hold the dense part trains alike: four gloo ranks follow one process with plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dhen.config import ModelConfig
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.training.distributed.engine import DenseBatch, DenseInputs, take_tables
from trials.training.distributed.parallelize import ParallelStep, device_mesh, parallelize
from trials.training.distributed_step import executed_strategy

HOSTS, RANKS_PER_HOST, STEPS, EXAMPLES = 2, 2, 4, 40
RANKS = HOSTS * RANKS_PER_HOST
SCHEMA = FeatureSchema(
    tables=(*(Table(name=name, rows=9) for name in "abc"), Table(name="m", rows=9, multi_hot=True)),
    numeric=("x", "y"),
)
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}
MODEL = parse_model({"embedding_dim": 8, "layers": [LAYER] * 2, "dropout": 0.0}, "test")
SEVERAL = MODEL.replace(members=3, members_from=1)
DP, ZERO1, HSDP, FSDP, ZERO2 = (
    Strategy(),
    Strategy(dense="zero1"),
    Strategy(dense="hsdp"),
    Strategy(dense="fsdp"),
    Strategy(dense="zero2"),
)
IN_PARTS = (ZERO1.replace(micro_batches=3), ZERO2.replace(checkpointing="full", micro_batches=3))
OFFLOADED = Strategy(dense="zero_offload", checkpointing="full", micro_batches=3)
WAITING = (
    Strategy(dense="hsdp", micro_batches=3, no_sync=True),
    Strategy(dense="shard_grad_op", micro_batches=2, no_sync=True),
    Strategy(dense="fsdp", checkpointing="full", micro_batches=4, no_sync=True),
    Strategy(dense="fsdp", offload=True, micro_batches=2, no_sync=True),
)
"""What is reduced in the last micro-batch alone: all, or across hosts (hsdp)."""
STRATEGIES = (
    *(DP, ZERO1, HSDP, FSDP, ZERO2),
    Strategy(checkpointing="full", micro_batches=4),
    *IN_PARTS,
    HSDP.replace(micro_batches=3),
    Strategy(dense="shard_grad_op", checkpointing="selective", micro_batches=2),
    FSDP.replace(offload=True, micro_batches=3),
    OFFLOADED,
    *WAITING,
)
SETTINGS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "sent in bf16": {"precision": "fp32", "all_reduce_precision": "bf16"},
    "bf16, sent in fp32": {"precision": "bf16", "all_reduce_precision": "fp32"},
    "bf16 moments": {"precision": "fp32", "optimizer_precision": "bf16"},
}
TOLERANCE = {
    "fp32": 1e-4,
    "bf16": 3e-2,
    "sent in bf16": 3e-3,
    "bf16, sent in fp32": 3e-2,
    "bf16 moments": 3e-3,
}
WITH_MEMBERS = (ZERO1, HSDP, FSDP.replace(checkpointing="full"), ZERO2)
"""In fp32 also with a model of several members."""
RUNS = [
    *((s, "fp32") for s in STRATEGIES),
    *((s, "bf16") for s in (DP, ZERO1, FSDP, IN_PARTS[1], OFFLOADED)),
    *((s, "bf16 moments") for s in (DP, FSDP, IN_PARTS[1], OFFLOADED)),
    *((s, "sent in bf16") for s in (DP, FSDP, *IN_PARTS)),
    *((s, "bf16, sent in fp32") for s in (DP, FSDP, WAITING[0], OFFLOADED)),
]


def config(setting: str) -> TrainingConfig:
    return TrainingConfig.model_validate(SETTINGS[setting] | {"learning_rate": 0.01, "weight_decay": 0.1})


def model(config: ModelConfig = MODEL) -> nn.Module:
    torch.manual_seed(0)
    built = build_model(config, SCHEMA).train()
    take_tables(built)
    return built


def batch(step: int, rank: int, ranks: int) -> DenseBatch:
    """A rank's part of one and the same batch of all."""
    generator = torch.Generator().manual_seed(step)

    def part(*shape: int) -> Tensor:
        return torch.randn(EXAMPLES, *shape, generator=generator).tensor_split(ranks)[rank].clone()

    embeddings = (part(3, 8).requires_grad_(), part(1, 8).requires_grad_())
    return DenseBatch(DenseInputs(embeddings, part(2)), (part() > 0).float(), part().abs())


def losses_and_gradients(step: ParallelStep, rank: int, ranks: int) -> tuple[list[float], list[Tensor]]:
    """The mean loss of all ranks at every step, and the embeddings' gradients of the last on this rank."""
    losses = []
    for number in range(STEPS):
        examples = batch(number, rank, ranks)
        loss = step.forward_backward(examples)
        step.update()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
    gradients = [e.grad for e in examples.inputs.embeddings if e.grad is not None]
    return losses, gradients


def every_strategy() -> dict[str, list[float]]:
    """On a rank: losses by strategy; gradients of the embeddings add up to those of the whole batch."""
    found = {}
    whole = losses_and_gradients(parallelize(model(), Strategy(), config("fp32")), 0, 1)[1]
    for strategy, setting in RUNS:
        mesh = device_mesh(strategy.dense, HOSTS, RANKS_PER_HOST, "cpu")
        step = parallelize(model(), strategy, config(setting), mesh)
        assert executed_strategy(step) == strategy
        torch.manual_seed(dist.get_rank())
        losses, gradients = losses_and_gradients(step, dist.get_rank(), RANKS)
        found[f"{setting} {strategy.name}"] = losses
        assert_replicas_equal(step.engine.module, strategy, mesh)
        if setting == "fp32":
            for mine, all_ranks in zip(gradients, whole, strict=True):
                expected = all_ranks.tensor_split(RANKS)[dist.get_rank()]
                torch.testing.assert_close(mine / RANKS, expected, rtol=1e-3, atol=1e-6)
        if setting == "bf16 moments" and strategy.dense in ("zero2", "zero_offload", "fsdp"):
            assert_goes_on(strategy, mesh)
    for strategy in WITH_MEMBERS:
        mesh = device_mesh(strategy.dense, HOSTS, RANKS_PER_HOST, "cpu")
        step = parallelize(model(SEVERAL), strategy, config("fp32"), mesh)
        found[f"members {strategy.name}"] = losses_and_gradients(step, dist.get_rank(), RANKS)[0]
    return found


def assert_goes_on(strategy: Strategy, mesh: DeviceMesh) -> None:
    """With bf16 moments: from what another engine held half way, to the bit, as one that was not interrupted.

    Not for DistributedDataParallel, which adds up in another order from its second step on.
    """
    torch.manual_seed(0)
    whole, half, again = (parallelize(model(), strategy, config("bf16 moments"), mesh) for _ in range(3))
    for step, numbers in ((whole, range(STEPS)), (half, range(2)), (again, range(2, STEPS))):
        if step is again:
            for name, held in half.engine.state().items():
                for mine, other in zip(again.engine.state()[name].pieces, held.pieces, strict=True):
                    assert (mine.values.dtype is torch.float32) == (name == "weight")
                    mine.values.copy_(other.values)
            again.engine.restored(2)
        for number in numbers:
            step.forward_backward(batch(number, dist.get_rank(), RANKS))
            step.update()
    for mine, other in zip(again.engine.state().values(), whole.engine.state().values(), strict=True):
        assert all(torch.equal(a.values, b.values) for a, b in zip(mine.pieces, other.pieces, strict=True))


def assert_replicas_equal(held: nn.Module, strategy: Strategy, mesh: DeviceMesh) -> None:
    """Ranks that hold the same weights hold them to the last bit, whatever was rounded at random."""
    if strategy.dense not in ("dp", "zero1", "zero2", "zero_offload", "hsdp"):
        return
    replicas = mesh.get_group("replicate") if strategy.dense == "hsdp" else None
    for parameter in held.parameters():
        mine = parameter.detach()
        mine = mine.to_local() if isinstance(mine, DTensor) else mine
        first = mine.clone()
        dist.broadcast(first, group=replicas, group_src=0)
        assert torch.equal(first, mine)


@pytest.fixture(scope="module")
def trained() -> dict[str, list[float]]:
    found: dict[str, list[float]] = on_ranks(every_strategy, RANKS)
    return found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """One process, PyTorch without any of ours around the model."""
    peer, losses = model(), []
    optimizer = torch.optim.AdamW(peer.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(STEPS):
        inputs, label_B, weight_B = batch(number, 0, 1)
        loss = F.binary_cross_entropy_with_logits(peer(inputs), label_B, weight_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ranks_follow_one_process(trained: dict[str, list[float]], plain: list[float]) -> None:
    """Losses differ from step to step by far more than what is allowed between strategies."""
    for strategy, setting in RUNS:
        name = f"{setting} {strategy.name}"
        assert trained[name] == pytest.approx(plain, abs=TOLERANCE[setting]), name
    assert min(abs(a - b) for a, b in pairwise(plain)) > 1e-3


def test_members_train_alike(trained: dict[str, list[float]], plain: list[float]) -> None:
    alone = losses_and_gradients(parallelize(model(SEVERAL), Strategy(), config("fp32")), 0, 1)[0]
    for strategy in WITH_MEMBERS:
        assert trained[f"members {strategy.name}"] == pytest.approx(alone, abs=TOLERANCE["fp32"])
    assert min(abs(a - b) for a, b in zip(alone, plain, strict=True)) > 1e-3


@pytest.mark.parametrize("dense", ["dp", "fsdp"])
def test_what_gradients_are_sent_in_makes_a_difference(trained: dict[str, list[float]], dense: str) -> None:
    for plain, other in (("fp32", "sent in bf16"), ("bf16", "bf16, sent in fp32")):
        assert trained[f"{plain} {dense}"] != trained[f"{other} {dense}"]


def test_one_rank_needs_no_process_group(plain: list[float]) -> None:
    assert losses_and_gradients(parallelize(model(), Strategy(), config("fp32")), 0, 1)[0] == pytest.approx(
        plain, abs=1e-4
    )


def test_recomputation_draws_the_same_dropout() -> None:
    def gradients(strategy: Strategy) -> list[Tensor]:
        torch.manual_seed(0)
        built = build_model(MODEL.replace(dropout=0.3), SCHEMA).train()
        take_tables(built)
        step = parallelize(built, strategy, config("fp32"))
        torch.manual_seed(1)
        return losses_and_gradients(step, 0, 1)[1]

    for mine, other in zip(gradients(Strategy(checkpointing="full")), gradients(Strategy()), strict=True):
        torch.testing.assert_close(mine, other)
