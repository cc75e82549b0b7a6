"""Ranks train as one process does, however the model is held, and evaluate exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from small_jobs import LAYER, a_job, apart, batches, fresh, log_with_few_buckets
from tools import needs
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.model import parse_model
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.data.prepared_log import PreparedLog
from trials.optim.adamw import compute_in
from trials.planner.ladder import ladder
from trials.records.job import Job
from trials.records.metrics import evaluate_predictions
from trials.records.strategy import Ranks, Strategy
from trials.store.weights import save_weights
from trials.training.distributed_step import DistributedStep
from trials.training.evaluation import evaluate, logits_over_ranks, metrics_over_ranks
from trials.training.scoring import score
from trials.training.step import TrainStep, WeightAverage

pytestmark = needs("torchrec")

CPU = torch.device("cpu")
STEPS, EVALUATE_AT = 4, (0, 1)
HOSTS, RANKS_PER_HOST, RANKS = 2, 2, 4
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


def strategies() -> list[Strategy]:
    """Each way of holding with everything on top; alone they are in tests/distributed/test_parallelize.py."""
    every = [each for each in ladder(HOSTS, RANKS_PER_HOST, 10) if each.tensor == 1 and not each.no_sync]
    every = [each for each in every if each.micro_batches == 4]
    return [
        max((each for each in every if each.dense == dense), key=lambda each: len(each.techniques))
        for dense in DENSE
    ]


def job(log: PreparedLog, model: ModelConfig = MODEL, **training: object) -> Job:
    """With a learning rate that does not amplify rounding: at 0.1, the order of a batch's rows alone moves losses
    by 3e-4 in 50 steps."""
    settings = {"weight_decay": 0.01, "epochs": 1, "embedding_learning_rate": 0.02, "clip_norm": CLIP_NORM}
    return a_job(log, model, seed=0, **settings | training)


def trained(step: TrainStep | DistributedStep, log: PreparedLog, ranks: Ranks) -> dict[str, Any]:
    """With evaluations in between, which must leave no trace, and of a mean of weights at the end."""
    losses, metrics, average = [], [], WeightAverage(step, 2)
    for number, batch in enumerate(batches(log, STEPS, ranks.rank, ranks.world)):
        factor = 1.0 - number / STEPS
        step.scale_learning_rates(dense=factor, tables=factor)
        loss = step(batch)
        if ranks.world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks.world)
        if number in EVALUATE_AT:
            step.settle()
            metrics.append(step.evaluate(log, "validation").to_dict())
            average.note()
    step.settle()
    average.note()
    with average.in_place(STEPS):
        of_mean = step.evaluate(log, "validation").ne
    found = {"losses": losses, "metrics": metrics, "finite": step.is_finite(), "weights": step.weights()}
    return found | {"of_mean": of_mean}


def on_a_rank(folder: Path) -> dict[str, Any]:
    """Every strategy beside one process, as rank 0 sees it."""
    log, ranks = PreparedLog.open(folder / "log"), Ranks(dist.get_rank(), HOSTS, RANKS_PER_HOST)
    cluster = load_cluster("zionex").with_ranks(f"{HOSTS}x{RANKS_PER_HOST}")
    found: dict[str, Any] = {
        "bf16": bf16(log, ranks, folder),
        "exact": exact_metrics(log, ranks),
        "torn": notices_nan(log, ranks),
    }
    plain = trained(TrainStep(fresh(log, MODEL), job(log).training), log, Ranks()) if ranks.first else {}
    for strategy in strategies():
        step = DistributedStep(fresh(log, MODEL), job(log), strategy, ranks, cluster, where=CPU)
        mine = trained(step, log, ranks)
        held = {kind: sum(len(p.values) for p in each.pieces) for kind, each in step.dense_state().items()}
        mine["held"] = held
        if ranks.first:
            mine["apart"] = apart(mine["weights"], plain["weights"])
        found[strategy.dense] = mine
    for name, model in (("mixed", MIXED), ("interpolated", INTERPOLATED)):
        found[name] = beside_one_process(model, log, ranks, cluster)
    return found | {"plain": plain}


def beside_one_process(
    model: ModelConfig, log: PreparedLog, ranks: Ranks, cluster: Cluster
) -> dict[str, Any]:
    """Embeddings decay by how often their ids occur: losses of ranks and of one process, how far their weights are
    apart, and the tables' shapes."""
    fsdp, this = Strategy(dense="fsdp", micro_batches=2), job(log, model, frequency_decay=FREQUENCY_DECAY)
    mine = trained(DistributedStep(fresh(log, model), this, fsdp, ranks, cluster, where=CPU), log, ranks)
    if not ranks.first:
        return {}

    def alone(job: Job) -> dict[str, Any]:
        return trained(DistributedStep(fresh(log, model), job, Strategy(), Ranks(), where=CPU), log, Ranks())

    plain = alone(this)
    tables = {name: list(w.shape) for name, w in plain["weights"].items() if "tables" in name}
    weights = apart(mine["weights"], plain["weights"])
    found = {"losses": mine["losses"], "plain": plain["losses"], "apart": weights, "tables": tables}
    if model is MIXED:
        found["decayed"] = apart(alone(job(log, model))["weights"], plain["weights"])
    return found


def bf16(log: PreparedLog, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Losses; and metrics of the ranks, also when they score saved weights, beside those of a plain model."""
    found, weights = {}, folder / "weights.safetensors"
    for dense in ("dp", "fsdp", "zero2", "zero_offload"):
        this, strategy = job(log, precision="bf16"), Strategy(dense=dense)
        step = DistributedStep(fresh(log, MODEL), this, strategy, ranks, where=CPU)
        mine = trained(step, log, ranks)
        here = step.evaluate(log, "validation").to_dict()
        if ranks.first:
            save_weights(mine["weights"], weights)
        scored = score(this, weights, log, "validation", ranks=ranks, strategy=strategy, cluster=None)
        found[dense] = {"losses": mine["losses"], "here": here, "scored": scored.to_dict()}
        if ranks.first:
            plain = fresh(log, MODEL)
            plain.load_state_dict(mine["weights"])
            found[dense]["plain"] = evaluate(compute_in(plain, "bf16"), log, "validation").to_dict()
    return found


def exact_metrics(log: PreparedLog, ranks: Ranks) -> dict[str, Any]:
    """Of scores that do not depend on how rows are cut into batches."""

    def score(features: FeatureBatch) -> Tensor:
        return features.numeric_BK.sum(dim=1).round(decimals=1)

    split = log.split("validation")
    logit_N = torch.from_numpy(np.array(split.inputs.numeric)).sum(dim=1).round(decimals=1).double()
    expected = evaluate_predictions(logit_N.sigmoid().numpy(), np.asarray(split.labels, dtype=np.float64))
    mine = metrics_over_ranks(logits_over_ranks(score, split, ranks), split, log, ranks)
    every = [None] * ranks.world
    dist.all_gather_object(every, mine)
    return {
        "rows": split.rows,
        "here": mine.to_dict(),
        "expected": expected.to_dict(),
        "alike": all(each == mine for each in every),
    }


def notices_nan(log: PreparedLog, ranks: Ranks) -> list[bool]:
    """A weight that is no number, on the last rank alone, is known to all."""
    step = DistributedStep(fresh(log, MODEL), job(log), Strategy(dense="fsdp"), ranks, where=CPU)
    if ranks.rank == ranks.world - 1:
        with torch.no_grad():
            step.dense_state()["weight"].pieces[0].values[0] = float("nan")
    known = [None] * ranks.world
    dist.all_gather_object(known, step.is_finite())
    return known  # type: ignore[return-value]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    log_with_few_buckets(folder, 610)
    found: dict[str, Any] = on_ranks(on_a_rank, RANKS, folder)
    return found


@pytest.mark.parametrize("dense", DENSE)
def test_every_strategy_follows_one_process(answers: dict[str, Any], dense: str) -> None:
    plain, found = answers["plain"], answers[dense]
    assert max(plain["losses"]) - min(plain["losses"]) > 0.01
    assert found["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE)
    assert found["apart"] < CLOSE_WEIGHTS
    assert found["of_mean"] == pytest.approx(plain["of_mean"], abs=TOLERANCE)
    assert found["finite"]
    for mine, other in zip(found["metrics"], plain["metrics"], strict=True):
        assert mine == pytest.approx(other, abs=TOLERANCE)


def test_mixed_dimensions_that_decay_by_frequency_follow_one_process(answers: dict[str, Any]) -> None:
    found = answers["mixed"]
    assert found["decayed"] > 100 * CLOSE_WEIGHTS
    assert [shape[1] for shape in found["tables"].values()] == [8, 4]
    assert found["losses"] == pytest.approx(found["plain"], abs=TOLERANCE)
    assert found["apart"] < CLOSE_WEIGHTS


def test_interpolated_buckets_follow_one_process(answers: dict[str, Any]) -> None:
    found = answers["interpolated"]
    assert found["losses"] == pytest.approx(found["plain"], abs=TOLERANCE)
    assert found["losses"] != pytest.approx(answers["plain"]["losses"], abs=TOLERANCE)
    assert found["apart"] < CLOSE_WEIGHTS


def test_ranks_hold_their_parts(answers: dict[str, Any]) -> None:
    whole = answers["dp"]["held"]["weight"]
    for dense in DENSE:
        held, shards = answers[dense]["held"], {"dp": 1, "hsdp": RANKS_PER_HOST}.get(dense, RANKS)
        assert held["exp_avg"] == pytest.approx(whole / shards, rel=0.2)
        assert held["weight"] == held["exp_avg"] == held["exp_avg_sq"]


def test_bf16_evaluates_what_it_trains(answers: dict[str, Any]) -> None:
    for dense, found in answers["bf16"].items():
        assert found["losses"] == pytest.approx(answers["plain"]["losses"], abs=3e-2), dense
        assert found["here"] == pytest.approx(found["plain"], abs=1e-3), dense
        assert found["scored"] == pytest.approx(found["here"], abs=1e-6), dense


def test_metrics_over_ranks_are_exact(answers: dict[str, Any]) -> None:
    exact = answers["exact"]
    assert exact["rows"] % RANKS
    assert exact["here"] == exact["expected"]
    assert exact["alike"]


def test_all_know_of_a_weight_that_is_no_number(answers: dict[str, Any]) -> None:
    assert not any(answers["torn"])
