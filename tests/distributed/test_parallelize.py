"""Every way to hold the dense part trains alike: four gloo ranks follow one process with plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import as_rank, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.dense_batch import DenseBatch, DenseInputs, take_tables
from trials.job import TrainingConfig
from trials.parallelize import ParallelStep, device_mesh, parallelize
from trials.planner.strategies import Strategy

HOSTS, RANKS_A_HOST, STEPS, EXAMPLES = 2, 2, 4, 40
RANKS = HOSTS * RANKS_A_HOST
SCHEMA = FeatureSchema(
    tables=(*(Table(name=name, rows=9) for name in "abc"), Table(name="m", rows=9, multi_hot=True)),
    numeric=("x", "y"),
)
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}
MODEL = parse_model({"embedding_dim": 8, "layers": [LAYER] * 2, "dropout": 0.0}, "test")
STRATEGIES = (
    Strategy(),
    Strategy(dense="zero1"),
    Strategy(dense="zero2"),
    Strategy(dense="hsdp"),
    Strategy(dense="fsdp"),
    Strategy(checkpointing="full", micro_batches=4),
    Strategy(dense="zero1", micro_batches=3),
    Strategy(dense="zero2", checkpointing="selective", micro_batches=2),
    Strategy(dense="fsdp", checkpointing="full"),
    Strategy(dense="fsdp", offload=True, micro_batches=3),
)
RUNS = [(s, "fp32") for s in STRATEGIES] + [(s, "bf16") for s in STRATEGIES[:5]]
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def config(precision: str) -> TrainingConfig:
    return TrainingConfig.model_validate({"precision": precision, "learning_rate": 0.01, "weight_decay": 0.1})


def model() -> nn.Module:
    torch.manual_seed(0)
    built = build_model(MODEL, SCHEMA).train()
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
    for strategy, precision in RUNS:
        mesh = device_mesh(strategy.dense, HOSTS, RANKS_A_HOST, "cpu")
        step = parallelize(model(), strategy, config(precision), mesh)
        losses, gradients = losses_and_gradients(step, dist.get_rank(), RANKS)
        found[f"{precision} {strategy.name}"] = losses
        if precision == "fp32":
            for mine, all_ranks in zip(gradients, whole, strict=True):
                expected = all_ranks.tensor_split(RANKS)[dist.get_rank()]
                torch.testing.assert_close(mine / RANKS, expected, rtol=1e-3, atol=1e-6)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    found: dict[str, list[float]] = on_ranks(__file__, RANKS, tmp_path_factory.mktemp("ranks"))
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


@pytest.mark.parametrize(("strategy", "precision"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_ranks_follow_one_process(
    trained: dict[str, list[float]], plain: list[float], strategy: Strategy, precision: str
) -> None:
    found = trained[f"{precision} {strategy.name}"]
    assert found == pytest.approx(plain, abs=TOLERANCE[precision])


def test_the_losses_tell_something(plain: list[float]) -> None:
    """They differ from step to step by far more than what is allowed between strategies."""
    assert min(abs(a - b) for a, b in pairwise(plain)) > 1e-3


def test_one_rank_needs_no_process_group(plain: list[float]) -> None:
    assert losses_and_gradients(parallelize(model(), Strategy(), config("fp32")), 0, 1)[0] == pytest.approx(
        plain, abs=1e-4
    )


def test_recomputation_draws_the_same_dropout() -> None:
    def gradients(strategy: Strategy) -> list[Tensor]:
        torch.manual_seed(0)
        built = build_model(MODEL.model_copy(update={"dropout": 0.3}), SCHEMA).train()
        take_tables(built)
        step = parallelize(built, strategy, config("fp32"))
        torch.manual_seed(1)
        return losses_and_gradients(step, 0, 1)[1]

    for mine, other in zip(gradients(Strategy(checkpointing="full")), gradients(Strategy()), strict=True):
        torch.testing.assert_close(mine, other)


if __name__ == "__main__":
    as_rank(every_strategy)
