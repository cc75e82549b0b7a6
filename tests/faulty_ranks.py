"""Ranks that add up numbers with each other, step by step, and misbehave when told to; a driver for them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.data.prepare.prepare_log import prepare
from trials.planner.memory_counter import MemoryLimitError
from trials.records.events import Event, Progress, TrainingEvent
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks
from trials.records.task import Task
from trials.records.trial_record import Measurements, Metrics
from trials.runtime.launcher import Launcher, Run, wait_for
from trials.runtime.worker import Emit, run_rank

HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
BAD_RANK, BAD_STEP = 2, 3
MISBEHAVES = "misbehaves"
"""The file that says that the bad rank has come so far."""
FAREWELL = 120.0
"""Seconds within which all processes must be gone; they need one or two."""
JOB = Job(
    model=parse_model({"embedding_dim": 4, "layers": [{"modules": ["dcn_v2"], "out_embeddings": 2}]}, "test"),
    features=FeatureSchema(tables=(Table(name="a", rows=9),), numeric=()),
    log="none",
    training=TrainingConfig(),
    seed=0,
)


def task(**changes: object) -> Task:
    given = {
        "job": JOB,
        "log_directory": "none",
        "threads": 1,
        "hosts": HOSTS,
        "gpus_per_host": RANKS_PER_HOST,
    }
    return Task.model_validate(given | changes)


def start(launcher: Launcher, folder: Path, fault: str = "", steps: int = 10, **changes: object) -> Run:
    folder.mkdir(exist_ok=True)
    return launcher.launch(partial(rank_main, fault, steps), task(**changes), folder)


def real_training(folder: Path, rows: int = 3000) -> Task:
    """A small model on a small log, by one rank."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    lines = (f"{draw.randint(0, 1)},{draw.random():.3f},{draw.randint(0, 40)}\n" for _ in range(rows))
    (folder / "log.csv").write_text("click,price,city\n" + "".join(lines))
    log = prepare([folder / "log.csv"], out=folder / "prepared")
    layer = {"modules": ["dcn_v2", "mlp"], "out_embeddings": 4}
    job = Job(
        model=parse_model({"embedding_dim": 8, "layers": [layer]}, "test"),
        features=log.features,
        log=log.fingerprint,
        training=TrainingConfig(epochs=1, batch_size=256).resolved(log.manifest.rows["train"], "fp32"),
        seed=0,
    )
    return Task(job=job, log_directory=str(log.directory), threads=1)


def rank_main(fault: str, steps: int, data: dict[str, object], folder: str, rank: int) -> None:
    run_rank(data, folder, rank, partial(add_up, fault, steps))


def add_up(fault: str, steps: int, _: Task, ranks: Ranks, folder: Path, emit: Emit) -> None:
    """A sum over all ranks is the work of a step."""
    print(f"rank {ranks.rank} begins", flush=True)
    (folder / f"{ranks.rank}.pid").write_text(str(os.getpid()))
    for step in range(steps):
        if (ranks.rank, step) == (BAD_RANK, BAD_STEP):
            (folder / MISBEHAVES).touch()
            misbehave(fault)
        total = torch.ones(())
        if ranks.world > 1:
            dist.all_reduce(total)
        assert total == ranks.world
        emit(Progress(examples=step + 1, total_examples=steps, seconds=0.0))
        time.sleep(0.01)
    emit(trained())


def misbehave(fault: str) -> None:
    if fault == "raise":
        raise ValueError("a fault of its own")
    if fault == "out of memory":
        raise MemoryLimitError(300, 200, "in a test")
    if fault == "sleep":
        time.sleep(600)
    if fault == "exit":
        os._exit(3)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault])


def trained() -> TrainingEvent:
    return TrainingEvent(
        best=Metrics(ne=0.9, log_loss=0.3, auc=0.7, calibration=1.0, examples=10),
        measured=Measurements(
            examples_per_second=1.0, step_ms=1.0, peak_memory_bytes=1, train_seconds=1.0, evaluate_seconds=0.0
        ),
    )


def everything(run: Run, seconds: float = 120.0) -> list[Event]:
    """All events until the end."""
    events, deadline = list[Event](), time.monotonic() + seconds
    while not run.ended:
        assert time.monotonic() < deadline, events
        wait_for([run])
        events += run.new_events()
    return events


def pids(folder: Path, ranks: int = RANKS, seconds: float = 120.0) -> list[int]:
    """Of all ranks, as soon as they have begun."""
    files = [folder / f"{rank}.pid" for rank in range(ranks)]
    _wait(lambda: all(file.exists() and file.read_text() for file in files), seconds)
    return [int(file.read_text()) for file in files]


def wait_until_it_misbehaves(folder: Path, seconds: float = 120.0) -> None:
    """Until the bad rank does; a driver that does not look meanwhile counts none of it as silence."""
    _wait((folder / MISBEHAVES).exists, seconds)


def _wait(there: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "ranks did not come so far"
        time.sleep(0.02)


def all_gone(found: list[int], seconds: float = FAREWELL) -> bool:
    """Whether these processes end within so many seconds; zombies have ended."""
    deadline = time.monotonic() + seconds
    while any(map(lives, found)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended, as zombies have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def fork_server() -> int:
    """Of this process."""
    from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]

    return int(_forkserver._forkserver_pid)


def drive(folder: str) -> None:
    """What a driver does: starts ranks, says who they and its fork server are, and follows them."""
    running = start(Launcher(), Path(folder), steps=1_000_000)
    print(*pids(Path(folder)), fork_server(), flush=True)
    everything(running, 600.0)
