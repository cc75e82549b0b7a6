"""Growing tables over ranks: the same rows as one process gives, and a training that goes on from a checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from command_line import write_log
from gloo_ranks import on_ranks
from interrupted import Told, broken_off, run
from small_jobs import BATCH, a_job, fresh
from tools import needs

from dhen.batch import Keys
from dhen.model import build_model, parse_model
from trials.cluster.this_machine import load_cluster
from trials.data.loader import train_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import GivenGrowing, ReadOptions
from trials.records.job import Job
from trials.records.strategy import Ranks, Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, STEPS = 2000, 16
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3}
MODEL = parse_model({"embedding_dim": 4, "layers": [LAYER], "dropout": 0.0}, "test")
GIVEN = GivenGrowing(capacity=30, columns=("user", "tags", "site"), evict="lru")
"""More users than rows, so that many give way."""
IN_TIME = GIVEN.replace(ttl="3h")
"""Rows are given back by the time stamps; a row of the log is a minute."""
KEYS = "features.growing.keys"


def job_of(log: PreparedLog, **training: object) -> Job:
    settings = {"epochs": 2, "evaluate_every": 700, "learning_rate": 5e-4, "embedding_learning_rate": 0.01}
    return a_job(log, MODEL, **settings | training)


def grown_log(folder: Path, given: GivenGrowing = GIVEN) -> PreparedLog:
    return prepare(
        [write_log(folder / "log.csv", ROWS)], out=folder / "log", options=ReadOptions(growing=given)
    )


@pytest.fixture(scope="module")
def in_steps(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    return grown_log(tmp_path_factory.mktemp("in_steps"))


@pytest.fixture(scope="module")
def in_time(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    return grown_log(tmp_path_factory.mktemp("in_time"), IN_TIME)


def trained(step: TrainStep | DistributedStep, log: PreparedLog, ranks: Ranks) -> dict[str, Any]:
    """What a training of some steps gives; the evaluation in between must admit nothing."""
    batches = train_batches(
        log.split("train"),
        batch_size=BATCH,
        seed=0,
        epoch=0,
        rank=ranks.rank,
        ranks=ranks.world,
        shuffle=not log.features.timed,
        timed=log.features.timed,
    )
    losses = []
    for number, batch in enumerate(itertools.islice(batches, STEPS)):
        loss = step(batch)
        if ranks.world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks.world)
        if number == STEPS // 2:
            step.settle()
            step.evaluate(log, "validation")
    step.settle()
    ne = step.evaluate(log, "validation").ne
    return {"losses": losses, "ne": ne, "weights": step.weights()}


def on_a_rank(folder: Path) -> dict[str, Any]:
    log, ranks, found = PreparedLog.open(folder), Ranks(dist.get_rank(), 1, 2), {}
    cluster = load_cluster("zionex").with_ranks("1x2")
    for strategy, more in (
        (Strategy(), {}),
        (Strategy(dense="fsdp", micro_batches=2), {"table_decay": 0.02}),
    ):
        job = job_of(log, **more)
        step = DistributedStep(fresh(log, MODEL), job, strategy, ranks, cluster, where=torch.device("cpu"))
        mine = trained(step, log, ranks)
        if ranks.first:
            plain = trained(TrainStep(fresh(log, MODEL), job.training), log, Ranks())
            found[strategy.name] = compared(mine, plain)
    return found


def compared(mine: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    weights = mine["weights"], plain["weights"]
    others = [name for name in weights[1] if name != KEYS]
    return {
        "losses": (mine["losses"], plain["losses"]),
        "ne": (mine["ne"], plain["ne"]),
        "apart": max(float((weights[0][name] - weights[1][name]).abs().max()) for name in others),
        "names": (sorted(weights[0]), sorted(weights[1])),
        "keys": [each[KEYS].tolist() for each in weights],
    }


@needs("torchrec")
@pytest.mark.parametrize("given", ["in_steps", "in_time"])
def test_ranks_give_the_rows_that_one_process_gives(request: pytest.FixtureRequest, given: str) -> None:
    answers: dict[str, Any] = on_ranks(on_a_rank, 2, request.getfixturevalue(given).directory)
    assert len(answers) == 2
    for name, found in answers.items():
        mine, plain = found["losses"]
        assert mine == pytest.approx(plain, abs=1e-5), name
        assert found["ne"][0] == pytest.approx(found["ne"][1], abs=1e-5), name
        assert found["apart"] < 1e-4, name
        assert found["names"][0] == found["names"][1]
        assert found["keys"][0] == found["keys"][1]
        assert sum(key != 0 for key in found["keys"][0]) > (10 if given == "in_time" else 30)


def test_one_rank_trains_alike_with_tables_in_an_engine(in_steps: PreparedLog) -> None:
    job = job_of(in_steps)
    plain = trained(TrainStep(fresh(in_steps, MODEL), job.training), in_steps, Ranks())
    step = DistributedStep(
        fresh(in_steps, MODEL), job, Strategy(checkpointing="full"), Ranks(), where=torch.device("cpu")
    )
    found = compared(trained(step, in_steps, Ranks()), plain)
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-6)
    assert found["keys"][0] == found["keys"][1]
    assert found["apart"] < 1e-5


def test_ids_have_rows_that_occur_often_enough_within_a_pass(tmp_path: Path) -> None:
    """Two passes over rows of which no batch is left out: twice seen in each is not four times."""
    given = GivenGrowing(capacity=3000, columns=("user",), admit_after=3)
    whole = grown_log(tmp_path, given)
    split = whole.split("train")
    assert split.inputs.keys is not None
    keys, counts = np.unique(split.inputs.keys, return_counts=True)
    assert (counts == 2).any()
    batch_size = 40
    assert split.rows % batch_size == 0
    told = run(job_of(whole, batch_size=batch_size), whole, Told(), None)
    model = build_model(MODEL, whole.features)
    model.load_state_dict(told.weights)
    rows = model.features.growing.index.find(
        model.features.growing.salted(Keys(torch.from_numpy(keys)[:, None], ()))
    )
    assert ((rows > 0).numpy() == (counts >= 3)).all()


def test_ids_lose_their_rows_that_were_not_seen_for_so_long(tmp_path: Path) -> None:
    """In batches of forty minutes, after each of which rows are looked through."""
    given = GivenGrowing(capacity=3000, columns=("user",), admit_after=1, ttl="6h")
    whole, batch_size = grown_log(tmp_path, given), 40
    split = whole.split("train")
    assert split.inputs.keys is not None
    assert split.timestamp is not None
    assert split.rows % batch_size == 0
    job = job_of(whole, batch_size=batch_size, order="log", epochs=1, evaluate_every=split.rows)
    told = run(job, whole, Told(), None)
    last_seen = dict(zip(split.inputs.keys[:, 0].tolist(), np.arange(split.rows) // batch_size, strict=True))
    newest = split.timestamp.reshape(-1, batch_size).max(axis=1)
    kept = [key for key, batch in last_seen.items() if newest[batch] > newest[-1] - 6 * 3_600_000]
    model = build_model(MODEL, whole.features)
    model.load_state_dict(told.weights)
    held, _ = model.features.growing.held(0)
    assert 1 < len(kept) < len(last_seen)
    assert sorted(held.tolist()) == sorted(kept)


@pytest.mark.parametrize(
    ("settings", "strategy", "examples"),
    [
        ({"weight_average": 2}, Strategy(), 1600),
        ({"table_decay": 0.02, "order": "log"}, Strategy(), 800),
        ({"table_precision": "fp16"}, Strategy(checkpointing="full"), 2700),
        ({"frequency_decay": 0.1}, Strategy(), 800),
        ({"order": "log"}, Strategy(), 1600),
    ],
    ids=["average", "table decay", "fp16, checkpointing", "frequency decay", "ttl in time"],
)
def test_one_rank_goes_on_to_the_bit(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    settings: dict[str, object],
    strategy: Strategy,
    examples: int,
) -> None:
    log: PreparedLog = request.getfixturevalue("in_time" if settings == {"order": "log"} else "in_steps")
    job = job_of(log, **settings)
    undisturbed = run(job, log, Told(), None, strategy=strategy)
    broken_off(job, log, tmp_path / "kept", examples, strategy=strategy)
    assert list((tmp_path / "kept").iterdir())
    again = run(job, log, Told(), tmp_path / "kept", strategy=strategy)
    assert again.answer == undisturbed.answer
    assert again.weights.keys() == undisturbed.weights.keys()
    for name, weight in undisturbed.weights.items():
        assert torch.equal(again.weights[name], weight), name
    assert (undisturbed.weights[KEYS] != 0).sum() > (10 if log.features.timed else 30)
