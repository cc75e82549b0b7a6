"""Every training setting under every technique: planned, or refused in words that name both; and trained, to the
same NE as under plain dp on as many ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from command_line import write_log
from gloo_ranks import on_ranks
from interrupted import Told
from servers.served_training import a_task, train_on_servers
from tools import needs

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from dhen.values import parse
from trials.cluster.this_machine import load_cluster
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.planner.estimates import PlanOptions
from trials.planner.ladder import EXCLUSIONS, exclusions_of
from trials.planner.plan import plan
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, named
from trials.training.distributed import zero_offload
from trials.training.loop import train

SERVED = {"synchrony": "sync"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"batch_size": 64},
    {"learning_rate": 1e-3},
    {"embedding_learning_rate": 0.02},
    {"weight_decay": 0.1},
    {"clip_norm": 0.3},
    {"embedding_decay": 1e-4},
    {"table_decay": 0.01},
    {"frequency_decay": 0.1},
    {"epochs": 2},
    {"evaluate_every": 200},
    {"patience": 1},
    {"plateau_factor": 0.5},
    {"schedule": "cosine"},
    {"weight_average": 2},
    {"order": "log"},
    {"precision": "bf16"},
    {"learning_rate_scaling": "sqrt", "reference_batch_size": 128},
    {"warmup_examples": 100},
    {"warmup_share": 0.2},
    {"optimizer": "onebit_adam"},
    {"power_sgd_rank": 2},
    {"optimizer_precision": "bf16"},
    {"table_precision": "fp16"},
    {"all_to_all_precision": "bf16"},
    {"all_reduce_precision": "bf16"},
    {"delayed_update": True},
    {"tables": SERVED},
    {"train_fraction": 0.5},
)
"""Each setting away from its default, with those that it needs or that need it after it."""
TECHNIQUES = {
    "dp+selective_checkpointing": "1x2",
    "dp+full_checkpointing": "1x2",
    "dp+micro_batches=2": "1x2",
    "zero1": "1x2",
    "zero2": "1x2",
    "zero_offload": "1x2",
    "shard_grad_op": "1x2",
    "hsdp": "2x2",
    "fsdp": "1x2",
    "fsdp+cpu_offload": "1x2",
    "dp+host_tables": "1x1",
    "dp+ssd_tables": "1x1",
    "dp+servers1": "1x1",
    "tensor2": "1x2",
    "pipeline2": "1x2",
}
"""Techniques, each on as few ranks as it needs."""
WHOLE_GRADIENTS = {name for name in TECHNIQUES if name.startswith("dp+")}
REFUSED = {
    "delayed_update": TECHNIQUES.keys() - {"zero_offload"},
    "optimizer": TECHNIQUES.keys() - WHOLE_GRADIENTS - {"zero1"},
    "power_sgd_rank": TECHNIQUES.keys() - WHOLE_GRADIENTS,
    "table_decay": {"dp+host_tables", "dp+ssd_tables"},
    "tables": {"dp+host_tables", "dp+ssd_tables", "tensor2", "pipeline2"},
}
"""Techniques that cannot have a setting."""
BESIDE_SERVERS = {"weight_average"}
"""What `training.tables.synchrony` excludes, whatever the technique."""
ROUNDED = {"precision", "optimizer", "power_sgd_rank", "optimizer_precision", "table_precision"}
"""What makes more of rounding than fp32 does: another order of sums changes what is rounded up."""
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}
MODEL = parse_model({"embedding_dim": 4, "layers": [LAYER] * 2, "dropout": 0.0}, "test")
SCHEMA = FeatureSchema(tables=(Table(name="user", rows=500),), numeric=("price",))
SHARED = {"batch_size": 42, "precision": "fp32", "epochs": 1, "learning_rate": 5e-4, "patience": 9}


def settings_of(technique: str, changed: dict[str, Any]) -> TrainingConfig:
    """With rates that do not amplify rounding, and servers where the technique has any."""
    served = {"tables": SERVED} if "servers" in technique else {}
    settings = SHARED | {"embedding_learning_rate": 0.01} | served | changed
    return parse(TrainingConfig, settings, "training").resolved(480, "fp32")


def test_every_setting_is_among_those_that_are_tried() -> None:
    assert {key for changed in SETTINGS for key in changed} == TrainingConfig.model_fields.keys()
    assert {each.key for each in EXCLUSIONS} | {"tables"} == REFUSED.keys()


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_pair_is_planned_or_refused_by_the_names_of_both(technique: str) -> None:
    asked, cluster = named(technique), load_cluster("zionex").with_ranks(TECHNIQUES[technique])
    for changed in SETTINGS:
        key, beside = next(iter(changed)), "servers" in technique and changed.keys() & BESIDE_SERVERS
        try:
            training = settings_of(technique, changed)
            chosen = plan(MODEL, SCHEMA, training, cluster, options=PlanOptions(technique=asked)).chosen
            said = None
        except UserError as error:
            chosen, said = None, str(error)
        assert (said is not None) == bool(technique in REFUSED.get(key, ()) or beside), (changed, said)
        if said is not None:
            assert ("tables.synchrony=" if beside else f"technique={asked.name}") in said
            assert (f"{key}=" if key != "tables" else "training.tables.synchrony=") in said
        else:
            assert chosen is not None, changed
            assert PlanOptions(technique=asked).allows(chosen.replace(table_cache=0))


def a_job(technique: str, changed: dict[str, Any], its_log: PreparedLog) -> Job:
    return Job(
        model=MODEL,
        features=its_log.features,
        log=its_log.fingerprint,
        training=settings_of(technique, changed),
        seed=1,
    )


def trained_together(technique: str) -> list[dict[str, Any]]:
    """Settings that the technique can have, except servers: those that it was trained with."""
    asked = named(technique)
    return [
        changed
        for changed in SETTINGS
        if "tables" not in changed
        and not ("servers" in technique and changed.keys() & BESIDE_SERVERS)
        and all(each.goes_with(asked) for each in exclusions_of(settings_of(technique, changed)))
    ]


@patch.object(zero_offload, "DELAY_AFTER", 3)  # of the few steps here
def on_a_rank(technique: str, folder: Path) -> list[tuple[float, float]]:
    """NE under the technique and under plain dp, for each setting; of a delayed update, the technique's twice."""
    log, shape = PreparedLog.open(folder / "log"), TECHNIQUES[technique]
    cluster = load_cluster("zionex").with_ranks(shape)
    ranks = Ranks(dist.get_rank(), *map(int, shape.split("x")))
    found = []
    for changed in trained_together(technique):
        job = a_job(technique, changed, log)
        options = PlanOptions(technique=named(technique))
        chosen = plan(job.model, job.features, job.training, cluster, options=options).chosen
        assert chosen is not None
        plain = chosen if job.training.delayed_update else named("dp")
        nes = []
        for strategy in (chosen, plain):
            told = Told()
            more = {"ranks": ranks, "strategy": strategy, "cluster": cluster}
            train(job, log, told, keep=told.weights.update, progress_seconds=9.0, **more)
            nes.append(math.nan if told.best is None else told.best)
        found.append((nes[0], nes[1]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    prepare([write_log(folder / "log.csv", 600)], out=folder / "log")
    return folder


@pytest.mark.slow
@needs("torchrec")
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_pair_trains_to_the_ne_of_plain_dp(folder: Path, technique: str, tmp_path: Path) -> None:
    if "servers" in technique:
        pairs = [
            with_servers(technique, changed, folder, tmp_path) for changed in trained_together(technique)
        ]
    else:
        hosts, per_host = map(int, TECHNIQUES[technique].split("x"))
        pairs = on_ranks(on_a_rank, hosts * per_host, technique, folder)
    for changed, (ne, plain) in zip(trained_together(technique), pairs, strict=True):
        tolerance = 5e-3 if changed.keys() & ROUNDED else 2e-5
        assert ne == pytest.approx(plain, abs=tolerance), changed


def with_servers(technique: str, changed: dict[str, Any], folder: Path, out: Path) -> tuple[float, float]:
    """NE with servers, and without."""
    opened = PreparedLog.open(folder / "log")
    nes = []
    for strategy in (technique, "dp"):
        task = a_task(a_job(strategy, changed, opened), folder / "log", strategy, 1)
        nes.append(train_on_servers(task, out / strategy).trained.best.ne)
    return nes[0], nes[1]
