"""Small jobs, as tests train them on ranks beside one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command_line import write_log
from torch import Tensor, nn

from dhen.config import ModelConfig
from dhen.model import build_model
from trials.data.loader import LabelledBatch, train_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import IdCounts, PreparedLog
from trials.data.roles.infer import infer_schema
from trials.records.job import Job
from trials.training.distributed_step import DistributedStep
from trials.training.step import TrainStep

BATCH = 42
"""Neither ranks nor micro-batches have equal parts of so many examples."""
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3, "raw_numeric": True}


def a_job(log: PreparedLog, model: ModelConfig, *, seed: int = 1, **training: object) -> Job:
    settings = {"batch_size": BATCH, "precision": "fp32", "patience": 9} | training
    job = Job.model_validate(
        {"model": model, "features": log.features, "log": log.fingerprint, "training": settings, "seed": seed}
    )
    return job.replace(training=job.training.resolved(log.split("train").rows, "fp32"))


def fresh(log: PreparedLog, model: ModelConfig) -> nn.Module:
    torch.manual_seed(0)
    return build_model(model, log.features).train()


def log_with_few_buckets(folder: Path, rows: int) -> PreparedLog:
    """Tables of 8 columns that are cut in two would have two Adagrad sums per row, and not follow one process."""
    schema = infer_schema([write_log(folder / "log.csv", rows)])
    numeric = {name: column.replace(buckets=8) for name, column in schema.numeric.items()}
    schema = schema.replace(columns={**schema.columns, **numeric})
    return prepare([folder / "log.csv"], out=folder / "log", schema=schema)


def batches(log: PreparedLog, steps: int, rank: int = 0, ranks: int = 1) -> list[LabelledBatch]:
    """The first ones of a rank, with the counts of ids that some trainings need."""
    split = log.split("train")
    counts = IdCounts(split, split.rows)
    found = train_batches(split, batch_size=BATCH, seed=0, epoch=0, rank=rank, ranks=ranks, counts=counts)
    return list(itertools.islice(found, steps))


def first_moment(step: TrainStep | DistributedStep, ranks: int = 1) -> Tensor:
    """The dense part's, put together from all ranks: a tenth of the gradient after one step."""
    state = step.dense_state()["exp_avg"]
    every: list[Any] = [[(start, values.clone()) for start, values in state.pieces]]
    if ranks > 1:
        (mine,), every = every, [None] * ranks
        dist.all_gather_object(every, mine)
    whole = torch.full((state.length,), float("nan"))
    for start, values in itertools.chain(*every):
        whole[start : start + len(values)] = values
    return whole


def apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two models' weights."""
    assert mine.keys() == other.keys()
    return max(
        float((mine[name].float() - other[name].float()).abs().max()) for name in mine if mine[name].numel()
    )
