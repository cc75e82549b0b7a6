"""Ranks train as one process does, however the model is held, and evaluate exactly."""

from __future__ import annotations

import itertools
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from command_line import write_log
from gloo_ranks import as_rank, on_ranks
from tools import needs
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.model import build_model, parse_model
from trials.cluster.cluster import Cluster
from trials.cluster.load import load_cluster
from trials.data.cache import PreparedLog
from trials.data.id_counts import IdCounts
from trials.data.loader import Batch, train_batches
from trials.data.log_schema import LogSchema
from trials.data.prepare.prepare_log import prepare
from trials.data.roles.infer import infer_schema
from trials.job import Job
from trials.metrics import evaluate_predictions
from trials.optim.master_weights import compute_in
from trials.planner.ladder import ladder
from trials.ranks import Ranks
from trials.storage.weights_file import save_weights
from trials.strategy import Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.evaluation import evaluate, logits_over_ranks, metrics_over_ranks
from trials.training.local_step import TrainStep
from trials.training.score_weights import score
from trials.training.weight_average import WeightAverage

pytestmark = needs("torchrec")

CPU = torch.device("cpu")
STEPS, FEW, BATCH, EVALUATE_AT = 36, 12, 42, (5, 24)
"""A long training, and one of most strategies; 42 examples over 4 ranks are 10 or 11 each."""
SHAPES = {2: (1, 2), 4: (2, 2)}
"""Hosts and ranks per host."""
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}
MODEL = parse_model({"embedding_dim": 4, "layers": [LAYER] * 2, "dropout": 0.0}, "test")
MIXED = MODEL.replace(embedding_dim=8, table_dim_exponent=0.5)
"""With tables of 4 and of 8 columns."""
INTERPOLATED = MODEL.replace(buckets="interpolated")
"""With tables of nodes, whose ids follow from those of buckets."""
DENSE = ("dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp")
TOLERANCE, CLOSE_WEIGHTS = 1e-5, 1e-4
FREQUENCY_DECAY = 0.1
CLIP_NORM = 0.3
"""Some gradients are longer than this and some are not: how long they are counts in AdamW, when it changes."""


def strategies(ranks: int) -> list[Strategy]:
    """On four ranks each way of holding alone and with everything on top; on two a few."""
    found = [each for each in ladder(*SHAPES[ranks], 10) if each.micro_batches in (1, 4) and not each.no_sync]
    found = [
        each for each in found if each.tensor == 1
    ]  # tests/distributed/test_tensor_parallel.py has others
    if ranks == 4:
        most = {dense: max(len(e.techniques) for e in found if e.dense == dense) for dense in DENSE}
        return [e for e in found if len(e.techniques) in (e.dense != "dp", most[e.dense])]
    return [each for each in found if each.checkpointing == "full" and each.micro_batches == 4]


def steps_of(strategy: Strategy, ranks: int) -> int:
    """Of four ranks two go a long way, whose optimizer and whose weights are sharded, with everything on top."""
    far = ranks == 4 and strategy.dense in ("zero2", "fsdp") and strategy.checkpointing == "full"
    return STEPS if far else FEW


def job(log: PreparedLog, model: ModelConfig = MODEL, **training: object) -> Job:
    """With a learning rate that does not amplify rounding: at 0.1, the order of a batch's rows alone moves losses
    by 3e-4 in 50 steps."""
    settings = {"batch_size": BATCH, "precision": "fp32", "weight_decay": 0.01, "epochs": 1}
    settings |= {"embedding_learning_rate": 0.02, "clip_norm": CLIP_NORM} | training
    return Job.model_validate(
        {
            "model": model,
            "features": log.features,
            "log": log.fingerprint,
            "training": settings,
            "seed": 0,
        }
    )


def fresh(model: ModelConfig = MODEL) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, log().features).train()


def few_buckets(log: Path) -> LogSchema:
    """Tables of 8 columns that are cut in two have two Adagrad sums per row, and do not follow one process."""
    schema = infer_schema([log])
    numeric = {name: column.replace(buckets=8) for name, column in schema.numeric.items()}
    return schema.replace(columns={**schema.columns, **numeric})


@cache
def log() -> PreparedLog:
    return PreparedLog.open(Path(os.environ["FOLDER"]) / "log")


@cache
def batches(ranks: Ranks) -> list[Batch]:
    split = log().split("train")
    parts = {"rank": ranks.rank, "ranks": ranks.world}
    found = train_batches(
        split, batch_size=BATCH, seed=0, epoch=0, counts=IdCounts(split, split.rows), **parts
    )
    return list(itertools.islice(found, STEPS))


def trained(step: TrainStep | DistributedStep, ranks: Ranks, steps: int) -> dict[str, Any]:
    """With evaluations in between, which must leave no trace, and of a mean of weights at the end."""
    losses, metrics, average = [], [], WeightAverage(step, 2)
    for number, batch in enumerate(batches(ranks)[:steps]):
        factor = 1.0 - number / STEPS
        step.scale_learning_rates(dense=factor, tables=factor)
        loss = step(batch)
        if ranks.world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks.world)
        if number in EVALUATE_AT:
            step.settle()
            metrics.append(step.evaluate(log(), "validation").to_dict())
            average.note()
    step.settle()
    average.note()
    with average.in_place(steps):
        of_mean = step.evaluate(log(), "validation").ne
    found = {"losses": losses, "metrics": metrics, "finite": step.is_finite(), "weights": step.weights()}
    return found | {"of_mean": of_mean}


def apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert mine.keys() == other.keys()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine if mine[name].numel())


def on_a_rank() -> dict[str, Any]:
    """Every strategy beside one process, as rank 0 sees it."""
    world = dist.get_world_size()
    ranks = Ranks(dist.get_rank(), *SHAPES[world])
    cluster = load_cluster("zionex").with_ranks("x".join(map(str, SHAPES[world])))
    found: dict[str, Any] = {"bf16": bf16(ranks), "exact": exact_metrics(ranks), "torn": notices_nan(ranks)}
    plain = {steps: one_process(steps) for steps in (FEW, STEPS)} if ranks.first else {}
    if ranks.first:
        found["plain"] = {name: plain[STEPS][name] for name in ("losses", "metrics")}
    for strategy in strategies(world):
        steps = steps_of(strategy, world)
        step = DistributedStep(fresh(), job(log()), strategy, ranks, cluster, where=CPU)
        mine = trained(step, ranks, steps)
        weights = mine.pop("weights")
        held = {kind: sum(len(p.values) for p in each.pieces) for kind, each in step.dense_state().items()}
        mine["held"] = held
        mine["means_apart"] = mine["of_mean"] - plain[steps]["of_mean"] if ranks.first else None
        mine["apart"] = apart(weights, plain[steps]["weights"]) if ranks.first else None
        found[strategy.name] = mine
    found["mixed"] = beside_one_process(MIXED, ranks, cluster)
    found["interpolated"] = beside_one_process(INTERPOLATED, ranks, cluster)
    return found


def one_process(steps: int) -> dict[str, Any]:
    return trained(TrainStep(fresh(), job(log()).training), Ranks(), steps)


def beside_one_process(model: ModelConfig, ranks: Ranks, cluster: Cluster) -> dict[str, Any]:
    """Embeddings decay by how often their ids occur: losses of ranks and of one process, how far their weights are
    apart, and the tables' shapes."""
    fsdp, this = Strategy(dense="fsdp", micro_batches=2), job(log(), model, frequency_decay=FREQUENCY_DECAY)
    mine = trained(DistributedStep(fresh(model), this, fsdp, ranks, cluster, where=CPU), ranks, FEW)
    if not ranks.first:
        return {}
    plain, without = (
        trained(DistributedStep(fresh(model), one, Strategy(), Ranks(), where=CPU), Ranks(), FEW)
        for one in (this, job(log(), model))
    )
    tables = {name: list(w.shape) for name, w in plain["weights"].items() if "tables" in name}
    weights = apart(mine["weights"], plain["weights"])
    decayed = apart(without["weights"], plain["weights"])
    found = {"losses": mine["losses"], "plain": plain["losses"], "apart": weights, "tables": tables}
    return found | {"decayed": decayed}


def bf16(ranks: Ranks) -> dict[str, Any]:
    """Losses; and metrics of the ranks, also when they score saved weights, beside those of a plain model."""
    found, weights = {}, Path(os.environ["FOLDER"]) / "weights.safetensors"
    for dense in ("dp", "fsdp", "zero2", "zero_offload"):
        this, strategy = job(log(), precision="bf16"), Strategy(dense=dense)
        step = DistributedStep(fresh(), this, strategy, ranks, where=CPU)
        mine = trained(step, ranks, FEW)
        here = step.evaluate(log(), "validation").to_dict()
        if ranks.first:
            save_weights(mine["weights"], weights)
        scored = score(this, weights, log(), "validation", ranks=ranks, strategy=strategy, cluster=None)
        found[dense] = {"losses": mine["losses"], "here": here, "scored": scored.to_dict()}
        if ranks.first:
            plain = fresh()
            plain.load_state_dict(mine["weights"])
            found[dense]["plain"] = evaluate(compute_in(plain, "bf16"), log(), "validation").to_dict()
    return found


def exact_metrics(ranks: Ranks) -> dict[str, Any]:
    """Of scores that do not depend on how rows are cut into batches."""

    def score(features: FeatureBatch) -> Tensor:
        return features.numeric_BK.sum(dim=1).round(decimals=1)

    split = log().split("validation")
    logit_N = torch.from_numpy(np.array(split.numeric)).sum(dim=1).round(decimals=1).double()
    expected = evaluate_predictions(logit_N.sigmoid().numpy(), np.asarray(split.labels, dtype=np.float64))
    mine = metrics_over_ranks(logits_over_ranks(score, split, ranks), split, log(), ranks)
    every = [None] * ranks.world
    dist.all_gather_object(every, mine)
    return {
        "rows": split.rows,
        "here": mine.to_dict(),
        "expected": expected.to_dict(),
        "alike": all(each == mine for each in every),
    }


def notices_nan(ranks: Ranks) -> list[bool]:
    """A weight that is no number, on the last rank alone, is known to all."""
    step = DistributedStep(fresh(), job(log()), Strategy(dense="fsdp"), ranks, where=CPU)
    if ranks.rank == ranks.world - 1:
        with torch.no_grad():
            step.dense_state()["weight"].pieces[0].values[0] = float("nan")
    known = [None] * ranks.world
    dist.all_gather_object(known, step.is_finite())
    return known  # type: ignore[return-value]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4], ids="{} ranks".format)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    write_log(folder / "log.csv", 3010)
    prepare([folder / "log.csv"], out=folder / "log", schema=few_buckets(folder / "log.csv"))
    found: dict[str, Any] = on_ranks(__file__, request.param, folder)
    return found | {"ranks": request.param}


def test_every_strategy_follows_one_process(answers: dict[str, Any]) -> None:
    plain = answers["plain"]
    assert plain["losses"][-1] < plain["losses"][0] - 0.01
    for strategy in strategies(answers["ranks"]):
        found = answers[strategy.name]
        steps = steps_of(strategy, answers["ranks"])
        assert found["losses"] == pytest.approx(plain["losses"][:steps], abs=TOLERANCE), strategy.name
        assert found["apart"] < CLOSE_WEIGHTS, strategy.name
        assert abs(found["means_apart"]) < TOLERANCE, strategy.name
        assert found["finite"]
        assert len(found["metrics"]) == sum(at < steps for at in EVALUATE_AT)
        for mine, other in zip(found["metrics"], plain["metrics"], strict=False):
            assert mine == pytest.approx(other, abs=TOLERANCE), strategy.name


def test_mixed_dimensions_that_decay_by_frequency_follow_one_process(answers: dict[str, Any]) -> None:
    found = answers["mixed"]
    assert found["decayed"] > 100 * CLOSE_WEIGHTS
    assert [shape[1] for shape in found["tables"].values()] == [8, 4]
    assert found["losses"] == pytest.approx(found["plain"], abs=TOLERANCE)
    assert found["apart"] < CLOSE_WEIGHTS


def test_interpolated_buckets_follow_one_process(answers: dict[str, Any]) -> None:
    found = answers["interpolated"]
    assert found["losses"] == pytest.approx(found["plain"], abs=TOLERANCE)
    assert found["losses"] != pytest.approx(answers["plain"]["losses"][:FEW], abs=TOLERANCE)
    assert found["apart"] < CLOSE_WEIGHTS


def test_ranks_hold_their_parts(answers: dict[str, Any]) -> None:
    ranks = answers["ranks"]
    held = {strategy.dense: answers[strategy.name]["held"] for strategy in strategies(ranks)}
    whole = held["dp"]["weight"]
    assert held["dp"]["exp_avg"] == whole
    shards = {
        "zero1": ranks,
        "zero2": ranks,
        "zero_offload": ranks,
        "shard_grad_op": ranks,
        "fsdp": ranks,
        "hsdp": 2,
    }
    for dense in held.keys() - {"dp"}:
        assert held[dense]["exp_avg"] == pytest.approx(whole / shards[dense], rel=0.2)
        assert held[dense]["exp_avg_sq"] == held[dense]["exp_avg"]
        assert held[dense]["weight"] == held[dense]["exp_avg"]


def test_bf16_evaluates_what_it_trains(answers: dict[str, Any]) -> None:
    for dense, found in answers["bf16"].items():
        assert found["losses"] == pytest.approx(answers["plain"]["losses"][:FEW], abs=3e-2), dense
        assert found["here"] == pytest.approx(found["plain"], abs=1e-3), dense
        assert found["scored"] == pytest.approx(found["here"], abs=1e-6), dense


def test_metrics_over_ranks_are_exact(answers: dict[str, Any]) -> None:
    exact = answers["exact"]
    assert exact["rows"] % answers["ranks"]
    assert exact["here"] == exact["expected"]
    assert exact["alike"]


def test_all_know_of_a_weight_that_is_no_number(answers: dict[str, Any]) -> None:
    assert not any(answers["torn"])


if __name__ == "__main__":
    as_rank(on_a_rank)
