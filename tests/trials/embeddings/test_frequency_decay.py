"""Embeddings decay by how often their ids occur: the gradient of a penalty, from counts of the rows trained on."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dhen.inputs.features import FeatureProcessing, matrices
from dhen.inputs.lift import node_names
from dhen.model import build_model, parse_model
from trials.data.loader import train_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import IdCounts, PreparedLog
from trials.records.job import Job
from trials.records.strategy import Ranks, Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.embeddings.make_engine import FrequencyDecay

DECAY = 0.3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    """Two categorical columns, a multi-hot one with empty bags, a number."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("log") / "log.csv"
    lines = ["click,a,b,tags,x"]
    for _ in range(900):
        tags = " ".join(f"t{t}" for t in rng.integers(0, 6, rng.integers(0, 4)))
        a, b = int(rng.exponential(3)), int(rng.integers(0, 9))
        lines.append(f"{int(rng.random() < 0.4)},a{a},b{b},{tags},{rng.random():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return prepare([path], out=path.parent / "cache")


@pytest.mark.parametrize("rows", [10, 700])
def test_counts_are_those_of_the_last_rows(
    log: PreparedLog, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.data.prepared_log.IDS_AT_ONCE", 64)
    split = log.split("train")
    last = split.inputs.slice(split.rows - rows, split.rows)
    inverse = IdCounts(split, rows).inverse(last)
    assert inverse.dtype == np.float32
    for column in range(last.categorical.shape[1]):
        counts = Counter(last.categorical[:, column].tolist())
        assert inverse[:, column].tolist() == pytest.approx(
            [1 / counts[i] for i in last.categorical[:, column]]
        )
    for place, bags in enumerate(last.bags, start=last.categorical.shape[1]):
        counts, ends = Counter(bags.ids.tolist()), bags.offsets
        means = [
            sum(1 / counts[i] for i in bags.ids[start:stop]) / max(stop - start, 1)
            for start, stop in pairwise(ends.tolist())
        ]
        assert inverse[:, place].tolist() == pytest.approx(means)


@pytest.mark.parametrize(
    "model",
    [{}, {"table_dim_exponent": 0.5}, {"buckets": "interpolated"}],
    ids=["one length", "mixed lengths", "nodes"],
)
def test_it_is_the_gradient_of_a_penalty_on_what_is_looked_up(
    log: PreparedLog, model: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layers = [{"modules": ["dcn_v2"], "out_embeddings": 2}]
    config = parse_model({"embedding_dim": 8, "layers": layers} | model, "test")
    features = build_model(config, log.features).features
    assert isinstance(features, FeatureProcessing)
    assert features.tables is not None
    split = log.split("train")
    (batch, *_) = train_batches(split, batch_size=64, seed=0, epoch=0, counts=IdCounts(split, split.rows))
    inverse_BT = batch.inverse_count_BT
    looked_up = [e.detach().requires_grad_() for e in features.tables(batch.features)]
    by_name = dict(zip([t.name for t in log.features.tables], inverse_BT.T, strict=True))
    assert log.features.bucketed
    # nodes of a number decay by the count of the bucket between them
    by_name |= {
        node: by_name[table.name] for table in log.features.bucketed for node in node_names(table.name)
    }
    places: list[list[str]] = []
    for matrix in matrices(features.tables).values():
        categorical = [table.name for table in matrix.tables if not table.multi_hot]
        places += [categorical] if categorical else []
        places += [[table.name] for table in matrix.tables if table.multi_hot]
    penalty = sum(
        (DECAY / 2 * by_name[name] * e[:, place].square().sum(dim=1)).sum()
        for e, group in zip(looked_up, places, strict=True)
        for place, name in enumerate(group)
    )
    expected = torch.autograd.grad(penalty, looked_up)  # type: ignore[arg-type]
    for e in looked_up:
        e.grad = torch.ones_like(e)
    FrequencyDecay(features.tables, len(log.features.categorical), DECAY, ranks=1)(looked_up, inverse_BT)
    for e, gradient in zip(looked_up, expected, strict=True):
        torch.testing.assert_close(e.grad, 1 + gradient)
        assert gradient.abs().sum() > 0


def test_a_step_decays_the_embeddings_that_it_looks_up_and_no_others(log: PreparedLog) -> None:
    """With a decay so large that the loss does not matter, and small steps, all of a batch's rows shrink."""
    config = parse_model({"embedding_dim": 8, "layers": [{"modules": ["dcn_v2"]}]}, "test")
    training = {"batch_size": 32, "precision": "fp32", "epochs": 1, "frequency_decay": 1e4}
    training |= {"embedding_learning_rate": 1e-3}
    job = Job.model_validate(
        {"model": config, "features": log.features, "log": "x", "training": training, "seed": 0}
    )
    torch.manual_seed(0)
    step = DistributedStep(
        build_model(config, log.features).train(), job, Strategy(), Ranks(), where=torch.device("cpu")
    )
    split = log.split("train")
    (batch, *_) = train_batches(split, batch_size=32, seed=0, epoch=0, counts=IdCounts(split, split.rows))
    before = step.weights()["features.tables.weight"]
    step(batch)
    after = step.weights()["features.tables.weight"]
    looked_up = torch.zeros(len(before), dtype=torch.bool)
    first = 0
    for place, table in enumerate(log.features.categorical):
        looked_up[first + batch.features.ids_BT[:, place].long()] = True
        first += table.rows
    norms = after[:first].norm(dim=1) - before[:first].norm(dim=1)
    assert (norms[looked_up[:first]] < 0).all()
    assert torch.equal(after[:first][~looked_up[:first]], before[:first][~looked_up[:first]])
