"""One-bit Adam on ranks: it follows its paper's algorithm, sends a thirtieth, and goes on from checkpoints to the
bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from command_line import write_log
from distributed.test_traffic import Traffic, weighed
from gloo_ranks import on_ranks
from interrupted import Told, broken_off, run
from small_jobs import LAYER as SMALL_LAYER
from small_jobs import a_job
from torch import Tensor, nn
from torch.optim import AdamW

from dhen.members import cross_entropy
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema
from trials.cluster.this_machine import load_cluster
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.optim import one_bit_adam
from trials.optim.one_bit_adam import BLOCK, LEAST_ROOT, LOOKS, OneBitAdam
from trials.planner.memory_counter import MemoryCounter
from trials.planner.pricing import CostModel
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy, named
from trials.training.distributed.engine import DenseBatch, DenseInputs
from trials.training.distributed.parallelize import ParallelStep, device_mesh, parallelize
from trials.training.distributed_step import executed_strategy

RANKS, FEWER, EXAMPLES, STEPS, LAG = 3, 2, 30, 14, 4
"""The variance is frozen after eight steps, as if these were the first of a longer training."""
TOTAL = LOOKS * LAG * EXAMPLES
SCHEMA = FeatureSchema(tables=(), numeric=tuple("abcdefgh"))
LAYER = {"modules": [{"kind": "mlp", "mlp": [128]}], "out_embeddings": 4}
MODEL = parse_model({"embedding_dim": 16, "layers": [LAYER] * 2, "dropout": 0.0}, "test")
WIDE = parse_model(
    {"embedding_dim": 16, "layers": [{"modules": [{"kind": "mlp", "mlp": [1024, 256]}]}], "dropout": 0.0},
    "test",
)
SETTINGS = {
    "optimizer": "onebit_adam",
    "batch_size": EXAMPLES,
    "precision": "fp32",
    "learning_rate": 5e-3,
    "weight_decay": 0.1,
    "epochs": 1,
}
HELD = ("dp", "zero1", "dp+micro_batches=2", "zero1+full_checkpointing+micro_batches=2")
CLIPPED = (HELD[0], HELD[3])
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def config(**more: object) -> TrainingConfig:
    return TrainingConfig.model_validate(SETTINGS | more).resolved(EXAMPLES * STEPS, "fp32")


def fresh(model: Any = MODEL) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, SCHEMA).train()


def batch(step: int, rank: int) -> DenseBatch:
    """A rank's part; nothing depends on numbers before the first layer's second half, which stay dead for long."""
    generator = torch.Generator().manual_seed(step)
    numeric = torch.randn(EXAMPLES, 8, generator=generator)
    label = (numeric[:, 0] + 0.5 * torch.randn(EXAMPLES, generator=generator) > 0).float()
    mine = slice(rank * EXAMPLES // RANKS, (rank + 1) * EXAMPLES // RANKS)
    return DenseBatch(DenseInputs((), numeric[mine]), label[mine], None)


def trained(step: ParallelStep, steps: int = STEPS, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, steps):
        loss = step.forward_backward(batch(number, dist.get_rank()))
        step.update()
        dist.all_reduce(loss)
        losses.append(loss.item() / RANKS)
    return losses


def wrapped(name: str, settings: TrainingConfig, model: Any = MODEL) -> ParallelStep:
    strategy = named(name)
    mesh = device_mesh(strategy.dense, 1, RANKS, "cpu")
    step = parallelize(fresh(model), strategy, settings, mesh, total_examples=TOTAL)
    assert executed_strategy(step) == strategy
    return step


# the paper's algorithm, written out for all workers in one process


def one_bit(x: Tensor) -> Tensor:
    """A block's signs times its mean magnitude."""
    blocks = torch.split(x, BLOCK)
    return torch.cat([torch.where(block >= 0, 1.0, -1.0) * block.abs().mean() for block in blocks])


def algorithm(clip_norm: float | None) -> list[float]:
    """Losses of all workers by algorithm 1 of the paper, momentum in units of the frozen roots."""
    model, settings = fresh(), config()
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    momentum, root = torch.empty(0), torch.empty(0)
    worker: list[Tensor] = []
    server = torch.empty(0)
    losses = []
    for number in range(1, STEPS + 1):
        gradients, loss = [], 0.0
        for rank in range(RANKS):
            inputs, label, _ = batch(number - 1, rank)
            of_rank = cross_entropy(model(inputs), label, None)
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(of_rank, parameters)]))
            loss += of_rank.item() / RANKS
        losses.append(loss)
        if number <= 2 * LAG:
            mean = torch.stack(gradients).mean(dim=0)
            if clip_norm is not None:
                mean *= min(1.0, clip_norm / mean.norm())
            for p, g in zip(parameters, torch.split(mean, [p.numel() for p in parameters]), strict=True):
                p.grad = g.view_as(p)
            optimizer.step()
            if number == 2 * LAG:
                moments = [optimizer.state[p] for p in parameters]
                roots = [(m["exp_avg_sq"].flatten() / (1 - BETA2**number)).sqrt() for m in moments]
                whole = torch.cat(roots).mean()
                roots = [r.clamp(min=LEAST_ROOT * r.mean() if r.any() else whole) for r in roots]
                root = torch.cat(roots) + EPSILON
                momentum = torch.cat([m["exp_avg"].flatten() for m in moments]) / root
                worker = [torch.zeros_like(root) for _ in range(RANKS)]
                server = torch.zeros_like(root)
            continue
        if clip_norm is not None:
            norm = torch.stack([g.norm() ** 2 for g in gradients]).mean().sqrt()
            gradients = [g * min(1.0, float(clip_norm / norm)) for g in gradients]
        sent = []
        for rank, gradient in enumerate(gradients):
            mine = BETA1 * momentum + (1 - BETA1) * gradient / root + worker[rank]
            sent.append(one_bit(mine))
            worker[rank] = mine - sent[-1]
        average = torch.stack(sent).mean(dim=0) + server
        momentum = one_bit(average)
        server = average - momentum
        with torch.no_grad():
            change = settings.learning_rate * momentum / (1 - BETA1**number)
            for p, c in zip(parameters, torch.split(change, [p.numel() for p in parameters]), strict=True):
                p.mul_(1 - settings.learning_rate * settings.weight_decay).sub_(c.view_as(p))
    return losses


# what ranks send


def traffic(name: str) -> dict[str, Any]:
    """Bytes of a step of each stage, and what the all-reduce itself has counted in one."""
    step = wrapped(name, config(), WIDE)
    optimizer = step.engine.optimizer
    assert isinstance(optimizer, OneBitAdam)
    of_steps = []
    for number in range(2 * LAG + 2):
        with Traffic() as seen:
            step.forward_backward(batch(number, dist.get_rank()))
            step.update()
        of_steps.append(weighed(seen.sent))
    assert optimizer.second_stage is not None
    counted = optimizer.second_stage.all_reduce.sent_bytes
    weights = 4 * sum(p.numel() for p in step.engine.module.parameters())
    return {"first": of_steps[2], "second": of_steps[-1], "counted": counted / 2, "weights": weights}


# memory


def held(name: str, precision: str, ranks: int = RANKS) -> list[float]:
    """The most that a rank has held over both stages, and what was planned."""
    settings, strategy = config(precision=precision), named(name)
    mesh = device_mesh(strategy.dense, 1, ranks, "cpu") if ranks > 1 else None
    with MemoryCounter() as counter:
        examples = batch(0, 0)
        step = parallelize(fresh(WIDE), strategy, settings, mesh, total_examples=TOTAL)
        for _ in range(2 * LAG + 2):
            step.forward_backward(examples)
            step.update()
    cluster = load_cluster("a100-80gb").with_ranks(f"1x{ranks}").replace(device="cpu")
    at_once = settings.replace(batch_size=len(examples.label_B) * ranks)
    memory = CostModel(WIDE, SCHEMA, at_once, cluster).memory(strategy)
    return [counter.peak, memory.total]


# trainings that are broken off


def job_of(log: PreparedLog, **more: object) -> Job:
    model = parse_model({"embedding_dim": 4, "layers": [SMALL_LAYER] * 2, "dropout": 0.1}, "test")
    settings = {"epochs": 1, "evaluate_every": 350, "optimizer": "onebit_adam"}
    return a_job(log, model, **settings | {"warmup_examples": 420, "clip_norm": 0.5} | more)


@patch.object(one_bit_adam, "VARIANCE_RATIO", 0.01)  # at the second look, whatever the variance is
def resumed(folder: Path) -> dict[str, Any]:
    """Broken off in the second stage; then to the end, by as many ranks, or by fewer that hold it otherwise."""
    world = dist.get_world_size()
    ranks, log = Ranks(dist.get_rank(), 1, world), PreparedLog.open(folder / "log")
    found: dict[str, Any] = {}
    for name, more in (("dp", {}), ("zero1+micro_batches=2", {"precision": "bf16", "weight_average": 2})):
        job, strategy = job_of(log, **more), named(name)
        if world == RANKS:
            whole = run(job, log, Told(), None, ranks=ranks, strategy=strategy)
            interrupted(job, log, folder / name, folder / f"{name} on fewer", ranks, strategy)
            again = run(job, log, Told(), folder / name, ranks=ranks, strategy=strategy)
            found[name] = {"whole": whole.answer, "again": again.answer}
        else:
            strategy = strategy.replace(dense="zero1" if strategy.dense == "dp" else "dp")
            again = run(job, log, Told(), folder / f"{name} on fewer", ranks=ranks, strategy=strategy)
            found[name] = again.answer
    return found


def interrupted(
    job: Job, log: PreparedLog, place: Path, copy: Path, ranks: Ranks, strategy: Strategy
) -> None:
    """After 650 examples; its checkpoints lie in two places."""
    broken_off(job, log, place, 650, ranks=ranks, strategy=strategy)
    dist.barrier()
    if ranks.first:
        shutil.copytree(place, copy)
    dist.barrier()


@patch.object(one_bit_adam, "VARIANCE_RATIO", 0.01)  # at the second look, whatever the variance is
def on_a_rank(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"resumed": resumed(folder)}
    for name in HELD:
        step = wrapped(name, config())
        found[name] = trained(step)
        assert_alike(step)
    for name in CLIPPED:
        found[f"{name}, clipped"] = trained(wrapped(name, config(clip_norm=0.2)))
    for name in HELD[1:3]:
        found[f"{name}, bf16"] = trained(wrapped(name, config(precision="bf16")))
    found["algorithm"], found["clipped"] = algorithm(None), algorithm(0.2)
    found["adamw"] = trained(wrapped("dp", config(optimizer="adamw")))
    found["held"] = {f"{name} {kind}": held(name, kind) for name in HELD[:2] for kind in ("fp32", "bf16")}
    found["held"]["one rank"] = held("dp", "bf16", 1)
    found["traffic"] = {name: traffic(name) for name in ("dp", "zero1")}
    return found


def assert_alike(step: ParallelStep) -> None:
    """Every rank has the same weights, to the bit."""
    for p in step.engine.module.parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_bit")
    prepare([write_log(folder / "log.csv", 1500)], out=folder / "log")
    return folder


@pytest.fixture(scope="module")
def answers(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(on_a_rank, RANKS, shared)
    return found


def test_ranks_follow_the_papers_algorithm_however_they_are_held(answers: dict[str, Any]) -> None:
    for name in HELD:
        assert answers[name] == pytest.approx(answers["algorithm"], abs=2e-4), name
    for name in CLIPPED:
        assert answers[f"{name}, clipped"] == pytest.approx(answers["clipped"], abs=2e-4), name
    assert answers["algorithm"] != pytest.approx(answers["clipped"], abs=1e-3)


def test_the_first_stage_is_adamw_and_the_second_is_not(answers: dict[str, Any]) -> None:
    mine, plain = answers["dp"], answers["adamw"]
    assert mine[: 2 * LAG + 1] == pytest.approx(plain[: 2 * LAG + 1], abs=1e-6)
    assert mine[2 * LAG + 1 :] != pytest.approx(plain[2 * LAG + 1 :], abs=1e-4)
    assert mine[-1] < mine[0] - 0.05


def test_bf16_trains_as_fp32_does(answers: dict[str, Any]) -> None:
    for name in HELD[1:3]:
        assert answers[f"{name}, bf16"] == pytest.approx(answers[name], abs=5e-2), name


def test_a_thirtieth_is_sent_in_the_second_stage_and_a_fifth_overall(answers: dict[str, Any]) -> None:
    """As ZeRO's paper counts: an all-reduce passes twice, the compressed one as an all-to-all and an
    all-gather."""
    for sent in answers["traffic"].values():
        ring = 2 * sent["weights"]
        assert sent["first"] == pytest.approx(ring, rel=0.01)
        assert sent["second"] <= ring / 30
        assert 0.15 * sent["first"] + 0.85 * sent["second"] <= ring / 5
        assert sent["counted"] == pytest.approx(sent["second"] * (RANKS - 1) / RANKS)


def test_ranks_hold_what_was_planned(answers: dict[str, Any]) -> None:
    for name, (peak, planned) in answers["held"].items():
        assert peak == pytest.approx(planned, rel=0.03), name


def gap(mine: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        abs(a["validation"]["ne"] - b["validation"]["ne"])
        for a, b in zip(mine["points"], other["points"], strict=True)
    )


def test_it_goes_on_to_the_bit_on_as_many_ranks(answers: dict[str, Any]) -> None:
    for name, found in answers["resumed"].items():
        assert found["again"] == found["whole"], name


def test_it_goes_on_from_more_ranks_held_in_another_way(shared: Path, answers: dict[str, Any]) -> None:
    for name, again in on_ranks(resumed, FEWER, shared).items():
        assert gap(again, answers["resumed"][name]["whole"]) < 0.03, name
