"""Tensor parallelism on 2 and 4 gloo ranks: numbers of one process, whole weights, checkpoints under any
degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from small_jobs import a_job, batches, first_moment, fresh, log_with_few_buckets
from tools import needs
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.planner.plans_on_ranks import Size, cluster, training_bytes
from benchmarks.planner.plans_on_ranks import job as large_job
from dhen.config import ModelConfig
from dhen.model import parse_model
from dhen.ops.split import split_parameters
from trials.cluster.this_machine import load_cluster
from trials.data.prepared_log import PreparedLog
from trials.planner.pricing import pricing_of
from trials.records.job import Job
from trials.records.strategy import Ranks, Strategy, named
from trials.training.checkpointer import Checkpoints, TrainingState
from trials.training.distributed.tensor_parallel import DATA, STAGES, TENSOR, model_mesh
from trials.training.distributed_step import DistributedStep
from trials.training.step import TrainStep

pytestmark = needs("torchrec")

CPU = torch.device("cpu")
STEPS = 4
SHAPES = {2: (1, 2), 4: (2, 2)}
SPLIT = ["mlp", "dlrm", "attention", "dcn_v2", "dcn", "conv", {"kind": "dcn_v2", "rank": 4}]
SPARSE = {"kind": "sparse_attention", "heads": 4, "block_size": 1, "per_head": True}
MODEL = parse_model(
    {
        "embedding_dim": 4,  # tables of 8 columns would be cut in two, with two Adagrad sums for each row
        "layers": [
            {"modules": [*SPLIT, SPARSE, "linear"], "out_embeddings": 2, "raw_numeric": True},
            {"modules": ["mlp"], "out_embeddings": 2},
        ],
        "head": [16],
        "dropout": 0.0,
    },
    "test",
)
DROPPING = MODEL.replace(dropout=0.3)
TECHNIQUES = {
    2: ("tensor2", "tensor2+full_checkpointing+micro_batches=3"),
    4: ("tensor2", "tensor2+zero1", "tensor2+zero1+micro_batches=2", "tensor4"),
}
CLIP_NORM = 0.3


def job(log: PreparedLog, model: ModelConfig = MODEL, **training: object) -> Job:
    settings = {"weight_decay": 0.01, "epochs": 1, "embedding_learning_rate": 0.02, "learning_rate": 2.5e-4}
    return a_job(log, model, seed=0, **settings | training)


def train(
    step: TrainStep | DistributedStep, log: PreparedLog, ranks: Ranks, first: int = 0, last: int = STEPS
) -> list[float]:
    losses = []
    for batch in batches(log, last, ranks.rank, ranks.world)[first:]:
        loss = step(batch)
        if ranks.world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks.world)
    return losses


def distance(mine: Tensor, other: Tensor) -> float:
    return float((mine - other).norm() / other.norm())


def apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max(distance(mine[name], other[name]) for name in mine if other[name].any())


def on_a_rank(folder: Path) -> dict[str, Any]:
    world, log = dist.get_world_size(), PreparedLog.open(folder / "log")
    ranks = Ranks(dist.get_rank(), *SHAPES[world])
    zionex = load_cluster("zionex").with_ranks("x".join(map(str, SHAPES[world])))

    def held(strategy: Strategy, this: Job) -> DistributedStep:
        return DistributedStep(fresh(log, this.model), this, strategy, ranks, zionex, where=CPU)

    found: dict[str, Any] = {}
    plain = TrainStep(fresh(log, MODEL), job(log).training)
    found["plain"] = train(plain, log, Ranks(), last=1)
    gradient = first_moment(plain)
    found["plain"] += train(plain, log, Ranks(), 1)
    metrics = plain.evaluate(log, "validation")
    for name in TECHNIQUES[world]:
        step = held(named(name), job(log))
        losses = train(step, log, ranks, last=1)
        mine: dict[str, Any] = {
            "executed": step.strategy.name,
            "gradient": distance(first_moment(step, world), gradient),
        }
        mine["held"] = sum(len(piece.values) for piece in step.dense_state()["exp_avg"].pieces)
        mine["losses"] = losses + train(step, log, ranks, 1)
        mine["ne"] = step.evaluate(log, "validation").ne - metrics.ne
        weights = step.weights()
        mine["apart"] = apart(weights, plain.weights()) if ranks.first else None
        mine["others_have_none"] = bool(weights) == ranks.first
        found[name] = mine
    found["whole"] = len(gradient)
    if world == 4:
        return found | {"clipped": clipped(log, ranks, held), "memory": memory(log, ranks)}
    return found | {"dropout": dropout(log, ranks, held), "resumed": resumed(log, ranks, held, folder)}


def memory(log: PreparedLog, ranks: Ranks) -> list[int]:
    """What the fullest rank should hold, and what it held, in training and evaluation."""
    strategy, where = named(TECHNIQUES[ranks.world][1]), cluster(ranks.world)
    this = large_job(log, Size(2, 768, 128), "fp32", ranks.world)
    held = torch.tensor(training_bytes(this, log, strategy, ranks, where))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return [pricing_of(this, where).memory(strategy).total, int(held)]


def clipped(log: PreparedLog, ranks: Ranks, held: Any) -> dict[str, Any]:
    """Losses of ranks and of one process whose gradients are clipped, and how many steps were."""
    this = job(log, clip_norm=CLIP_NORM, learning_rate=0.01)
    plain = TrainStep(fresh(log, MODEL), this.training)
    expected = train(plain, log, Ranks())
    found: dict[str, Any] = {"plain": expected, "steps": plain.clipped_steps()}
    for name in TECHNIQUES[ranks.world][:2]:
        step = held(named(name), this)
        found[name] = [train(step, log, ranks), step.clipped_steps()]
    return found


def dropout(log: PreparedLog, ranks: Ranks, held: Any) -> dict[str, Any]:
    """After steps with dropout: whether what tensor ranks have alike is alike to the bit, whether the parts of
    split activations dropped alike (they must not), and whether those of whole ones did."""
    strategy = Strategy(tensor=2, checkpointing="full")
    step = held(strategy, job(log, DROPPING))
    torch.manual_seed(ranks.rank // 2)
    train(step, log, ranks, last=2)
    model = step.model
    splits = split_parameters(model)
    mine = {name: p.detach().clone() for name, p in model.named_parameters() if name not in splits}
    patterns = []
    layer = model.layers[0]
    layer = getattr(layer, "_checkpoint_wrapped_module", layer)
    tower = next(block[1] for block in layer.blocks if isinstance(next(block.children()), nn.Flatten))
    for one in tower:
        one.register_forward_hook(lambda _, __, y: patterns.append((y > 0).clone()))
    for one in tower:
        torch.nn.init.zeros_(one.weight)
        torch.nn.init.ones_(one.bias)
    step(batches(log, 1, ranks.rank, ranks.world)[0])
    everyone: list[Any] = [None] * ranks.world
    dist.all_gather_object(everyone, (mine, patterns[:2]))
    (first, (split, whole)), (second, (other_split, other_whole)) = everyone[:2]
    return {
        "alike": all(torch.equal(first[name], second[name]) for name in first),
        "split_alike": torch.equal(split, other_split),
        "whole_alike": torch.equal(whole, other_whole),
        "dropped": float(split.float().mean()),
        "checked": len(first),
    }


def resumed(log: PreparedLog, ranks: Ranks, held: Any, folder: Path) -> dict[str, Any]:
    """Losses of trainings that go on under another way to hold the model than they began with."""
    found = {}
    for before, after in (("tensor2", "fsdp"), ("zero1", "tensor2"), ("tensor2", "tensor2")):
        checkpoints = Checkpoints(folder / f"{before}-{after}", job(log), ranks)
        step = held(named(before), job(log))
        train(step, log, ranks, last=2)
        checkpoints.save(step, TrainingState(next_evaluation=1, steps=2), None)
        step = held(named(after), job(log))
        checkpoints.restore(step)
        found[f"{before}, then {after}"] = train(step, log, ranks, 2)
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    log_with_few_buckets(folder, 3010)
    return {ranks: on_ranks(on_a_rank, ranks, folder) | {"ranks": ranks} for ranks in SHAPES}


@pytest.fixture(params=SHAPES, ids="{} ranks".format)
def answers(request: pytest.FixtureRequest, of_ranks: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return of_ranks[request.param]


def test_ranks_follow_one_process(answers: dict[str, Any]) -> None:
    plain = answers["plain"]
    assert max(plain) - min(plain) > 0.01
    for name in TECHNIQUES[answers["ranks"]]:
        found = answers[name]
        assert found["executed"] == name
        assert found["gradient"] < 1e-6, name
        assert found["losses"] == pytest.approx(plain, abs=1e-5), name
        assert abs(found["ne"]) < 1e-4
        assert found["apart"] < 1e-2
        assert found["others_have_none"]


def test_ranks_hold_parts(answers: dict[str, Any]) -> None:
    """Most weights are in maps that are split."""
    for name in TECHNIQUES[answers["ranks"]]:
        shards = named(name).tensor * (2 if "zero1" in name else 1)
        assert answers[name]["held"] < 1.5 * answers["whole"] / shards, name


def test_ranks_hold_what_was_planned(of_ranks: dict[int, dict[str, Any]]) -> None:
    planned, held = of_ranks[4]["memory"]
    assert planned == pytest.approx(held, rel=0.03)


def test_the_norm_is_that_of_all_gradients(of_ranks: dict[int, dict[str, Any]]) -> None:
    found = of_ranks[4]["clipped"]
    assert 0 < found["steps"] <= STEPS
    for name in TECHNIQUES[4][:2]:
        losses, steps = found[name]
        assert steps == found["steps"]
        assert losses == pytest.approx(found["plain"], abs=1e-4), name


def test_dropout_is_alike_only_where_activations_are(of_ranks: dict[int, dict[str, Any]]) -> None:
    found = of_ranks[2]["dropout"]
    assert found["alike"]
    assert found["checked"]
    assert found["whole_alike"]
    assert not found["split_alike"]
    assert found["dropped"] == pytest.approx(0.7, abs=0.1)


def test_a_training_goes_on_under_another_degree(of_ranks: dict[int, dict[str, Any]]) -> None:
    for name, losses in of_ranks[2]["resumed"].items():
        assert losses == pytest.approx(of_ranks[2]["plain"][2:], abs=1e-5), name


@pytest.mark.parametrize(
    ("pipeline", "rank", "data", "tensor", "stages"),
    [(2, 0, [0, 2], [0, 1], [0, 4]), (2, 5, [5, 7], [4, 5], [1, 5]), (1, 5, [1, 3, 5, 7], [4, 5], [5])],
)
def test_tensor_ranks_are_neighbours_and_stages_far_apart(
    pipeline: int, rank: int, data: list[int], tensor: list[int], stages: list[int]
) -> None:
    """A host has a tensor group, which sends most; stages are on other hosts, since they send least."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        mesh = model_mesh(8, 2, "cpu", pipeline)
        groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in (DATA, TENSOR, STAGES)]
    finally:
        dist.destroy_process_group()
    assert groups == [data, tensor, stages]
