"""What runs inside a training process: one task, its events, its log, then the end of the process.

Started by `trials.launcher`; knows a job and an event stream, nothing of studies or samplers.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from dhen.model import build_model
from dhen.values import Value, parse
from trials.checkpoint import load_weights, read_weights, save_weights
from trials.data.cache import PreparedLog
from trials.evaluation import evaluate
from trials.events import EVENTS, RANK_LOG, WEIGHTS, EventWriter, Failed, Scored
from trials.hardware import device
from trials.job import Job
from trials.loop import train
from trials.master_weights import compute_in
from trials.memory_pool import keep_freed_memory


class Task(Value):
    """What one process does: train a job, or score a trained one on a split."""

    job: Job
    log_directory: str
    """Of the prepared log."""
    threads: int
    score_split: str | None = None
    """Evaluate the weights in the trial's directory on this split in place of training."""
    start_from: str | None = None
    """A weights file to start training from in place of fresh weights."""
    progress_seconds: float = 0.5
    """Between two progress events of a training."""


def main(task_data: dict[str, object], directory: str) -> None:
    """The process's entry: runs the task in `directory`; exits with 0 where its events tell the outcome."""
    folder = Path(directory)
    _redirect_output(folder / RANK_LOG)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C means
    _die_with_parent()
    with EventWriter(folder / EVENTS) as emit:
        try:
            task = parse(Task, task_data, "task")
            _prepare_process(task.threads)
            _run(task, folder, emit)
        except Exception as error:
            traceback.print_exc()
            out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            emit(Failed(error=f"{type(error).__name__}: {error}", out_of_memory=out_of_memory))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing of torch's or OpenMP's teardown can hang here


def _prepare_process(threads: int) -> None:
    """What makes training fast in this process."""
    keep_freed_memory()
    torch.set_flush_denormal(True)  # Adam's moments of units that died become denormal: steps took 1.4 times
    torch.set_num_threads(threads)


def _run(task: Task, folder: Path, emit: EventWriter) -> None:
    log = PreparedLog.open(Path(task.log_directory))
    if task.score_split is not None:
        model = build_model(task.job.model, task.job.features)
        load_weights(model, folder / WEIGHTS)
        assert task.job.training.precision != "auto"
        compute_in(model.to(device()), task.job.training.precision)
        metrics = evaluate(model, log, task.score_split)
        emit(Scored(split=task.score_split, metrics=metrics))
        return
    start_from = read_weights(Path(task.start_from)) if task.start_from else None
    train(
        task.job,
        log,
        emit,
        keep=lambda best: save_weights(best, folder / WEIGHTS),
        start_from=start_from,
        progress_seconds=task.progress_seconds,
    )


def _redirect_output(path: Path) -> None:
    """Everything printed here, by C code too, goes to the rank's log."""
    file = path.open("ab", buffering=0)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable()


def _die_with_parent() -> None:
    """A process whose driver is gone ends, however the driver went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
