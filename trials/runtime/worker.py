"""What runs inside a training process: one rank of a task, its events, its log, then the end of the process.

Started by `trials.runtime.launcher`; knows a job and an event stream, nothing of studies or samplers. Rank
0 alone writes events. A rank that fails says why in a file of its own and is gone at once, so that its peers
notice.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dhen.errors import UserError
from dhen.values import parse
from trials.cluster.machine import device
from trials.data.log_views import LogAtOrigin, LogWithValidation, TaughtLog
from trials.data.prepared_log import PreparedLog
from trials.records.events import (
    EVENTS,
    START_MARK,
    WEIGHTS,
    Event,
    EventWriter,
    FailureEvent,
    LastWords,
    ScoreEvent,
    TimingEvent,
    TrainingEvent,
    logits_file,
)
from trials.records.strategy import Ranks, Strategy
from trials.records.task import Task
from trials.runtime.fork_server import end_with_parent, tidy_up_at_exit
from trials.runtime.rank_process import DISK_FULL_CODE, log_to_stderr
from trials.store.user_cache import disk_full, is_disk_full
from trials.store.weights import read_optimizer_state, read_weights, save_weights
from trials.training.checkpoint_files import newest_whole
from trials.training.checkpointer import table_part
from trials.training.loop import train
from trials.training.memory_limit import (
    keep_freed_memory,
    limited_memory,
    needed_and_limit,
    out_of_memory,
)
from trials.training.process_group import join, meeting_of_servers
from trials.training.progressive import Pulse
from trials.training.schedule import assist
from trials.training.scoring import candidate_time, keep_logits, score
from trials.training.servers.client import Servers
from trials.training.servers.messages import Share
from trials.training.servers.server import Server

LOG = logging.getLogger(__name__)
COLLECTIVE_SECONDS = 600.0
"""Seconds after which a collective that waits for a rank fails: a backstop behind `deadline_seconds`."""
FORK_SERVER = os.getpid()
"""Id of the process that has imported this file: in a rank that was forked from it, its parent."""
tidy_up_at_exit()

Emit = Callable[[Event], None]


Body = Callable[[Task, Ranks, Path, Emit], None]
"""The function that a rank runs between its start and its end."""


def main(task_data: dict[str, object], directory: str, rank: int) -> None:
    """Is the process's entry: runs one rank of the task in `directory`."""
    run_rank(task_data, directory, rank, _run)


def run_rank(task_data: dict[str, object], directory: str, rank: int, body: Body) -> None:
    """Makes this process a rank, runs `body`, and ends the process; exit code 0 if that went well."""
    folder, code = Path(directory), 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what Ctrl-C means
    # a process ends once its driver is gone, however it went: the fork server ends with the driver if no rank
    # holds its pipe, and the kernel ends ranks with the server
    fork_server: Any = vars(forkserver)["_forkserver"]
    if fork_server._forkserver_alive_fd is not None:
        os.close(fork_server._forkserver_alive_fd)
        fork_server._forkserver_alive_fd = None
    end_with_parent(FORK_SERVER if os.getpid() != FORK_SERVER else os.getppid())
    task = parse(Task, task_data, "task")
    server = task.server(rank)
    # before CUDA is asked for anything: others of this host are not the task's, and a server computes on the host
    if (devices := () if server is not None else task.devices) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    ranks = task.ranks(0 if server is not None else rank)
    try:
        logs = task.logs(folder)
        _redirect_output(logs.path(rank))
        log_to_stderr(logs.words(rank), debug=task.debug)
        _log_task(task, ranks if server is None else None)
        keep_freed_memory()
        # Adam's moments of units that died become denormal: steps took 1.4 times
        torch.set_flush_denormal(True)
        torch.set_num_threads(task.threads)
        if server is not None:
            _serve(task, folder, server)
        else:
            with _process_group(task, ranks, folder), _events(ranks, folder) as emit:
                body(task, ranks, folder, emit)
        LOG.info("done")
        code = 0
    except Exception as error:
        code = DISK_FULL_CODE if is_disk_full(error) else 1
        with contextlib.suppress(OSError):  # on a full disk the exit code alone says why
            _say_why(error, folder, None if len(task.processes_here) == 1 and ranks.world == 1 else rank)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # nothing of torch's or OpenMP's teardown can hang here


def _serve(task: Task, folder: Path, number: int) -> None:
    """Runs a server of embedding tables until all ranks have left."""
    weights, learnt = None, dict[str, torch.Tensor]()
    if task.score_split is not None:
        weights = read_weights(folder / WEIGHTS)
    elif task.start_from is not None:
        weights = read_weights(Path(task.start_from))
        if task.start_learnt:
            learnt = table_part(read_optimizer_state(Path(task.start_from)))
    workers, strategy = task.hosts * task.gpus_per_host, task.strategy
    share = Share(number, strategy.servers)
    server = Server(task.job, share, workers, strategy.server_level, weights, learnt)
    del weights, learnt
    if task.restarts:
        assert task.resume_from is not None
        server.go_on(*newest_whole(Path(task.resume_from)))
    server.serve(meeting_of_servers(folder, task.address, makes=False), task.restarts)


@contextlib.contextmanager
def _servers(task: Task, ranks: Ranks, folder: Path) -> Iterator[Servers | None]:
    """Returns the servers of the embedding tables; None if ranks hold them."""
    if not task.strategy.servers:
        yield None
        return
    makes = ranks.first and not dist.is_initialized()
    store = meeting_of_servers(folder, task.address, makes=makes)
    servers = Servers(
        store,
        ranks.rank,
        ranks.world,
        task.strategy.servers,
        servers_return=task.trains and task.job.training.tables.servers_return,
    )
    LOG.info("connected to %d server(s) of embedding tables", servers.count)
    yield servers
    servers.leave()


def _say_why(error: Exception, folder: Path, rank: int | None) -> None:
    """Says why the rank ends, to the driver first, then to the log; `rank` is given if there are several."""
    lack = out_of_memory(error)
    cause = lack or error
    needed, limit = needed_and_limit(cause)
    full = is_disk_full(error)
    words = str(cause) if isinstance(cause, UserError) else f"{type(cause).__name__}: {cause}"
    if full and not isinstance(cause, UserError):
        words = str(disk_full(getattr(error, "filename", None) or folder))
    failed = FailureEvent(
        error=words,
        out_of_memory=lack is not None,
        disk_full=full,
        needed_bytes=needed,
        limit_bytes=limit,
    )
    if rank is None:
        with EventWriter(folder / EVENTS) as emit:
            emit(failed)
    else:
        LastWords(failed=failed, unix_seconds=time.time()).leave(folder, rank)
    if isinstance(cause, UserError):  # it says what is wrong, and not with our code
        LOG.error("%s", cause)
    else:
        LOG.error("out of memory" if lack else "failed", exc_info=error)


def _log_task(task: Task, ranks: Ranks | None) -> None:
    """Logs what this process is about to do; `ranks` is where a rank stands, None for a server."""
    name = task.logs(Path()).name
    if ranks is None:
        LOG.info("%s: strategy %s, %d thread(s)", name, task.strategy.name, task.threads)
    else:
        LOG.info(
            "%s: strategy %s, rank %d of %d (%d x %d), %s, %d thread(s), %s bytes of memory",
            name,
            task.strategy.name,
            ranks.rank,
            ranks.world,
            ranks.hosts,
            ranks.gpus_per_host,
            device(),
            task.threads,
            "any number of" if task.hbm is None else f"at most {task.hbm:,}",
        )
    LOG.debug("task: %s", task.model_dump_json(exclude_defaults=True))


@contextlib.contextmanager
def _process_group(task: Task, ranks: Ranks, folder: Path) -> Iterator[None]:
    """Makes the process group: all ranks are there when it begins; none leaves before the first has said how it
    ended."""
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.rank - task.ranks_here[0])
    alone = ranks.world == 1 or task.ranks_on_their_own
    if alone and not task.strategy.fully_sharded:
        yield
        return
    seconds = max(COLLECTIVE_SECONDS, 2 * (task.deadline_seconds or 0.0))
    join(ranks, folder, task.address, seconds=seconds)
    yield
    dist.barrier()


@contextlib.contextmanager
def _events(ranks: Ranks, folder: Path) -> Iterator[Emit]:
    """Returns where events go: rank 0 writes them; what the others say is dropped."""
    if not ranks.first:
        yield lambda _: None
        return
    with EventWriter(folder / EVENTS) as emit:
        yield emit


def _run(task: Task, ranks: Ranks, folder: Path, emit: Emit) -> None:
    LOG.info("log: %s", task.log_directory)
    log = PreparedLog.open(Path(task.log_directory))
    if task.job.origin is not None:
        log = LogAtOrigin(log, task.job.origin)
    if task.job.refit is not None:
        log = LogWithValidation(log)
    if task.serving is not None:
        forward = candidate_time(task.job, log, task.serving)
        LOG.info("a forward pass of %d examples takes %.3f ms", forward.batch, forward.ms)
        emit(TimingEvent(forward=forward))
        return
    if task.score_split is not None:
        with _servers(task, ranks, folder) as servers:
            metrics = score(
                task.job,
                folder / WEIGHTS,
                log,
                task.score_split,
                ranks=ranks,
                strategy=task.strategy,
                cluster=task.cluster,
                evaluation_rows=task.evaluation_rows,
                servers=servers,
                keep=keep_logits(logits_file(folder, task.score_split)) if task.keep_logits else None,
                goes_on=Pulse(emit, task.progress_seconds, examples=0),
            )
        LOG.info("%s: NE %.6f of %s examples", task.score_split, metrics.ne, f"{metrics.examples:,}")
        emit(ScoreEvent(split=task.score_split, metrics=metrics))
        return
    if task.teacher is not None:
        log = TaughtLog(log, Path(task.teacher))
    start_from = read_weights(Path(task.start_from)) if task.start_from else None
    LOG.info("weights: %s", task.start_from or f"fresh, from seed {task.job.seed}")
    own = task.ranks_on_their_own
    with limited_memory(task.hbm, device()) as peak_bytes, _servers(task, ranks, folder) as servers:
        if own and not ranks.first:
            assert servers is not None
            assist(task.job, log, servers, start_from, task.strategy, task.cluster)
            return
        ends = list[TrainingEvent]()  # the good end waits for what only all ranks together know

        def report(event: Event) -> None:
            if isinstance(event, TrainingEvent):
                ends.append(event)
            else:
                emit(event)

        arguments: dict[str, Any] = {}
        if task.resume_from is not None:
            arguments["resume_from"] = Path(task.resume_from)
            if task.checkpoint_seconds is not None:
                arguments["checkpoint_seconds"] = task.checkpoint_seconds
        among = Ranks() if own else ranks
        if among.world > 1 or task.strategy != Strategy():  # beyond plain training in one process
            arguments |= {"ranks": among, "strategy": task.strategy, "cluster": task.cluster}
        train(
            task.job,
            log,
            report,
            keep=lambda best: save_weights(best, folder / WEIGHTS),
            start_from=start_from,
            progress_seconds=task.progress_seconds,
            servers=servers,
            evaluation_rows=task.evaluation_rows,
            ends_at=task.ends_at,
            **arguments,
        )
        peak: int | None = None
        if task.hbm is not None or ranks.world > 1:  # of the fullest rank, better known than by the training
            fullest = torch.tensor(peak_bytes())
            if dist.is_initialized():
                dist.all_reduce(fullest, dist.ReduceOp.MAX)
            peak = int(fullest)
        for end in ends:
            known = end.measured if peak is None else end.measured.replace(peak_memory_bytes=peak)
            emit(end.replace(measured=known))


def _redirect_output(path: Path) -> None:
    """Sends everything printed here, by C code too, to the rank's log; all stacks too, when asked for."""
    file = path.open("ab", buffering=0)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    print(f"{START_MARK}process {os.getpid()}, {time.strftime('%F %T')}", flush=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
