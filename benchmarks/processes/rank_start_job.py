"""What each rank does in `rank_start_time.py`: joins, trains a small DHEN for ten steps under DP, and ends.

As a program of its own it is a rank that torchrun has started: `rank_start_job.py FOLDER`.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy
from trials.records.task import Task
from trials.records.trial_record import Measurements, Metrics
from trials.runtime.launcher import Launcher
from trials.runtime.rank_process import LocalRank
from trials.runtime.worker import Emit, run_rank
from trials.training.distributed.engine import DenseBatch, DenseInputs
from trials.training.distributed.parallelize import device_mesh, parallelize

RANKS, STEPS, EXAMPLES = 4, 10, 64
JOINED = "joined"
"""The file that rank 0 leaves when all ranks are there."""
JOB = Job(
    model=parse_model(
        {"embedding_dim": 8, "layers": [{"modules": ["dcn_v2"], "out_embeddings": 2, "raw_numeric": True}]},
        "job",
    ),
    features=FeatureSchema(tables=(), numeric=("x", "y")),
    log="none",
    training=TrainingConfig(precision="fp32"),
    seed=0,
)


def train(folder: Path) -> None:
    """Ten steps; the process group is there."""
    if dist.get_rank() == 0:
        (folder / JOINED).write_text(str(time.time()))
    torch.manual_seed(0)
    model = build_model(JOB.model, JOB.features).train()
    step = parallelize(model, Strategy(), JOB.training, device_mesh("dp", 1, RANKS, "cpu"))
    for _ in range(STEPS):
        inputs = DenseInputs((), torch.randn(EXAMPLES, 2))
        loss = step.forward_backward(DenseBatch(inputs, torch.ones(EXAMPLES)))
        step.update()
    assert loss.isfinite()


def ours(data: dict[str, object], folder: str, rank: int) -> None:
    """A rank that our launcher has started."""
    run_rank(data, folder, rank, _body)


def _body(_: Task, ranks: Ranks, folder: Path, emit: Emit) -> None:
    from trials.records.events import TrainingEvent

    train(folder)
    quality = Metrics(ne=1.0, log_loss=1.0, auc=0.5, calibration=1.0, examples=1)
    emit(
        TrainingEvent(
            best=quality,
            measured=Measurements(
                examples_per_second=1.0,
                step_ms=1.0,
                peak_memory_bytes=1,
                train_seconds=1.0,
                evaluate_seconds=0.0,
            ),
        )
    )


def spawned(rank: int, folder: str) -> None:
    """A rank that torch.multiprocessing.spawn has started."""
    join_and_train(rank, (Path(folder) / "meet").as_uri(), Path(folder))


class JobLauncher(Launcher):
    """Its ranks run this job, on whichever host they are started."""

    def ranks(self, task: Task, directory: Path, processes: Sequence[int] | None = None) -> list[LocalRank]:
        return self._fork(ours, task, directory, processes)


def join_and_train(rank: int, method: str, folder: Path) -> None:
    """A rank in a process that somebody else has started."""
    torch.set_num_threads(1)
    _join(method, rank)
    train(folder)
    dist.destroy_process_group()


def _join(method: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=120)
    )


if __name__ == "__main__":
    join_and_train(int(os.environ["RANK"]), "env://", Path(sys.argv[1]))
