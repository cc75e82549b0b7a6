"""Ranks that have a model's layers one after another, or parts of them, train as one process does, under every
schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from small_jobs import LAYER, a_job, apart, batches, first_moment, fresh, log_with_few_buckets
from tools import needs

from dhen.config import ModelConfig
from dhen.model import parse_model
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.data.loader import LabelledBatch
from trials.data.prepared_log import PreparedLog
from trials.planner.pipeline import orders
from trials.records.job import Job
from trials.records.strategy import Ranks, Strategy, named
from trials.training.checkpointer import Checkpoints, TrainingState
from trials.training.distributed_step import DistributedStep

pytestmark = needs("torchrec")

CPU = torch.device("cpu")
STEPS = 4
SHAPES = {2: (1, 2), 4: (2, 2)}
"""Hosts and ranks per host."""
LAYERS = [LAYER, {"modules": ["attention"], "out_embeddings": 4}, LAYER, LAYER]
MODEL = parse_model({"embedding_dim": 4, "layers": LAYERS, "dropout": 0.0}, "test")
"""Layers that take raw numeric inputs are on later stages too."""
MEMBERS = MODEL.replace(members=2, members_from=1, embedding_dim=8, table_dim_exponent=0.5)
"""With two members that part in the second layer, and tables of two lengths."""
NAMES = {
    2: (
        "pipeline2+micro_batches=4",
        "pipeline2=gpipe+full_checkpointing+micro_batches=2",
        "pipeline2=interleaved+micro_batches=4",
        "pipeline2=zero_bubble+micro_batches=8",
    ),
    4: (
        "pipeline2+zero1+micro_batches=4",
        "pipeline4+micro_batches=8",
        "tensor2+pipeline2=zero_bubble+selective_checkpointing+micro_batches=4",
    ),
}
CLIP_NORM = 0.3
"""Some gradients are longer than this, over all stages."""
ROUNDED = 3e-6
"""What rounding makes of a gradient: sums have another order on another processor."""


def job(log: PreparedLog, model: ModelConfig = MODEL, **training: object) -> Job:
    settings = {"weight_decay": 0.01, "epochs": 1, "embedding_learning_rate": 0.02, "learning_rate": 2.5e-4}
    return a_job(log, model, seed=0, **settings | {"clip_norm": CLIP_NORM} | training)


def trained(step: DistributedStep, log: PreparedLog, mine: list[LabelledBatch], ranks: int) -> dict[str, Any]:
    """With evaluations in between, which must leave no trace."""
    losses, metrics, gradient = [], [], torch.empty(0)
    for number, batch in enumerate(mine):
        factor = 1.0 - number / STEPS
        step.scale_learning_rates(dense=factor, tables=factor)
        loss = step(batch)
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
        if number == 0:
            gradient = first_moment(step, ranks)
        if number == 1:
            step.settle()
            metrics.append(step.evaluate(log, "validation").to_dict())
    step.settle()
    return {
        "losses": losses,
        "metrics": metrics,
        "gradient": gradient,
        "clipped": step.clipped_steps(),
        "finite": step.is_finite(),
        "weights": step.weights(),
    }


def beside(mine: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """How far a training is from that of one process."""
    gradient = plain["gradient"]
    return {
        "losses": [a - b for a, b in zip(mine["losses"], plain["losses"], strict=True)],
        "gradient": float((mine["gradient"] - gradient).norm() / gradient.norm()),
        "clipped": [mine["clipped"], plain["clipped"]],
        "metrics": [[metrics["ne"] for metrics in of["metrics"]] for of in (mine, plain)],
        "weights": apart(mine["weights"], plain["weights"]),
        "finite": mine["finite"],
    }


def executed(
    strategy: Strategy, ranks: Ranks, cluster: Cluster, log: PreparedLog, this: Job
) -> dict[str, Any]:
    """A strategy beside one process, as rank 0 sees it."""
    step = DistributedStep(fresh(log, this.model), this, strategy, ranks, cluster, where=CPU)
    part = ranks.data_part(strategy.pipeline)
    mine = trained(step, log, batches(log, STEPS, *part), ranks.world)
    held = [None] * ranks.world
    dist.all_gather_object(held, sum(len(p.values) for p in step.dense_state()["exp_avg"].pieces))
    name, scheduled = step.strategy.name, passes(step, batches(log, STEPS, *part)[0])
    if not ranks.first:
        return {}
    alone = DistributedStep(fresh(log, this.model), this, Strategy(), Ranks(), where=CPU)
    plain = trained(alone, log, batches(log, STEPS), 1)
    found = beside(mine, plain)
    return found | {"held": held, "name": name, "passes": scheduled, "whole": len(plain["gradient"])}


def passes(step: DistributedStep, batch: LabelledBatch) -> list[list[Any]]:
    """What torch's schedule does in a step on this rank, pass by pass."""
    found: list[list[Any]] = []
    scheduled = step._dense._schedule  # type: ignore[union-attr]
    for stage in getattr(scheduled, "_stages", None) or [scheduled._stage]:
        _note(stage, found)
    step(batch)
    return found


def _note(stage: Any, found: list[list[Any]]) -> None:
    forward, backward, weights = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.backward_weight_one_chunk,
    )

    def noted_forward(number: int, *args: Any, **kwargs: Any) -> Any:
        found.append(["F", stage.stage_index, number])
        return forward(number, *args, **kwargs)

    def noted_backward(number: int, *args: Any, **kwargs: Any) -> Any:
        found.append(["B" if kwargs.get("full_backward", True) else "I", stage.stage_index, number])
        return backward(number, *args, **kwargs)

    def noted_weights(number: int, *args: Any, **kwargs: Any) -> Any:
        found.append(["W", stage.stage_index, number])
        return weights(number, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = noted_forward, noted_backward
    stage.backward_weight_one_chunk = noted_weights


def on_a_rank(folder: Path) -> dict[str, Any]:
    world = dist.get_world_size()
    log, ranks = PreparedLog.open(folder / "log"), Ranks(dist.get_rank(), *SHAPES[world])
    cluster = load_cluster("zionex").with_ranks("x".join(map(str, SHAPES[world])))
    found = {name: executed(named(name), ranks, cluster, log, job(log)) for name in NAMES[world]}
    if world == 4:
        found["resumed"] = goes_on_otherwise(ranks, cluster, log, folder, "tensor2+pipeline2+micro_batches=4")
    if world == 2:
        this = job(log, MEMBERS, frequency_decay=0.1)
        found["members"] = executed(named("pipeline2+micro_batches=2"), ranks, cluster, log, this)
        in_bf16 = job(log, precision="bf16", clip_norm=None)
        found["bf16"] = executed(named("pipeline2+micro_batches=4"), ranks, cluster, log, in_bf16)
        found["resumed"] = goes_on_otherwise(ranks, cluster, log, folder, "pipeline2+micro_batches=4")
    return found


def goes_on_otherwise(
    ranks: Ranks, cluster: Cluster, log: PreparedLog, folder: Path, staged: str
) -> dict[str, Any]:
    """A training that is cut short on a pipeline goes on without one, and the other way round."""
    this, half = job(log), STEPS // 2
    found = {}
    for first, then in ((staged, "zero1"), ("zero1", staged)):
        losses = []
        checkpoints = Checkpoints(folder / f"{first} then {then}", this, ranks, seconds=0.0)
        for number, name in enumerate((first, then)):
            strategy = named(name)
            step = DistributedStep(fresh(log, MODEL), this, strategy, ranks, cluster, where=CPU)
            part = ranks.data_part(strategy.pipeline)
            if number:
                assert checkpoints.restore(step) is not None
            some = batches(log, STEPS, *part)[number * half : (number + 1) * half]
            losses += trained(step, log, some, ranks.world)["losses"]
            if not number:
                checkpoints.save(step, TrainingState(next_evaluation=1, steps=half), None)
        found[first] = losses
    return found


@pytest.fixture(scope="module", params=SHAPES, ids="{} ranks".format)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    log_with_few_buckets(folder, 510)
    found: dict[str, Any] = on_ranks(on_a_rank, request.param, folder)
    return found | {"ranks": request.param}


def names(answers: dict[str, Any]) -> tuple[str, ...]:
    return NAMES[answers["ranks"]]


def test_pipelines_follow_one_process(answers: dict[str, Any]) -> None:
    for name in names(answers):
        found = answers[name]
        assert found["gradient"] < ROUNDED, name
        assert max(map(abs, found["losses"])) < 1e-5, name
        assert found["metrics"][0] == pytest.approx(found["metrics"][1], abs=1e-5), name
        assert found["weights"] < 1e-4, name
        assert found["clipped"][0] == found["clipped"][1] > 0, name
        assert found["finite"]
        assert found["name"] == named(name).name


def test_passes_are_those_that_are_priced(answers: dict[str, Any]) -> None:
    for name in names(answers):
        strategy = named(name)
        planned = orders(strategy.schedule, strategy.pipeline, strategy.micro_batches)[0]
        assert answers[name]["passes"] == [list(each) for each in planned], name


def test_ranks_hold_their_stages(answers: dict[str, Any]) -> None:
    for name in names(answers):
        found, strategy = answers[name], named(name)
        copies = 1 if strategy.dense == "zero1" else answers["ranks"] // strategy.model_ranks
        if strategy.tensor == 1:
            assert sum(found["held"]) == copies * found["whole"]
        assert copies * found["whole"] <= sum(found["held"]) < 1.4 * copies * found["whole"]
        assert max(found["held"]) < 0.7 * found["whole"] / strategy.tensor


def test_members_and_tables_of_several_lengths_follow_one_process(answers: dict[str, Any]) -> None:
    if answers["ranks"] == 2:
        found = answers["members"]
        assert found["gradient"] < ROUNDED
        assert max(map(abs, found["losses"])) < 1e-5
        assert found["weights"] < 1e-4


def test_bf16_follows_one_process_as_nearly_as_it_rounds(answers: dict[str, Any]) -> None:
    if answers["ranks"] == 2:
        found = answers["bf16"]
        assert found["gradient"] < 3e-2
        assert max(map(abs, found["losses"])) < 3e-2


def test_a_training_goes_on_without_its_pipeline_and_the_other_way_round(answers: dict[str, Any]) -> None:
    one, other = answers["resumed"].values()
    assert len(one) == STEPS
    assert one == pytest.approx(other, abs=1e-5)
