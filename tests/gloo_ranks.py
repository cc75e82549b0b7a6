"""Processes that wait for work as gloo ranks, started once in each pytest process.

`on_ranks(function, 2, folder)` calls a function of a module as each of two ranks, and gives what it returned on
rank 0. Each call has a process group of its own. The processes are forked from the fork server that trainings
have, so torch and TorchRec are imported once. Tests that kill ranks start others: a `RankGroup`, or `forked`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trials.runtime.launcher import Launcher

SECONDS = 600


class RankError(AssertionError):
    """A rank raised an exception, with its traceback, or died."""


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """What the function returns on rank 0 of so many."""
    __tracebackhide__ = True
    return _shared().call(function, ranks, *arguments)


class RankGroup:
    """Ranks; more are started as more are wanted, and all anew after a failure, since the others may hang."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        self._calls = 0

    def call(self, function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
        __tracebackhide__ = True
        folder = self._folder
        while len(self._ranks) < ranks:
            here, there = multiprocessing.Pipe()
            output = folder / f"{len(self._ranks)}.log"
            self._ranks.append((forked(_serve, output, there), here))
            there.close()
        self._calls += 1
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:ranks])}
        for pipe, rank in waiting.items():
            pipe.send((function, arguments, rank, ranks, folder / f"call{self._calls}"))
        while waiting:
            for pipe in wait([*waiting], SECONDS) or [*waiting]:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                failure = f"nothing after {SECONDS} s"
                if pipe.poll():  # type: ignore[union-attr]
                    try:
                        answers[rank], failure = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        failure = f"died\n{(folder / f'{rank}.log').read_text()}"
                if failure:
                    self.end()
                    raise RankError(f"rank {rank}: {failure}")
        return answers[0]

    def end(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()


def forked(function: Callable[..., None], output: Path, *arguments: Any) -> ForkServerProcess:
    """A process that calls the function; what it prints goes into a file."""
    Launcher(several_ranks=True).warm_up()
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(function, str(output), dict(os.environ), *arguments), daemon=True
    )
    process.start()
    return process


@functools.cache
def _shared() -> RankGroup:
    return RankGroup()


def _run(function: Callable[..., None], output: str, environment: dict[str, str], *arguments: Any) -> None:
    with Path(output).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    function(*arguments)


def _serve(pipe: Connection) -> None:
    """A rank of each call that comes, until the test's process has ended."""
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, rank, ranks, rendezvous = pipe.recv()
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=rendezvous.as_uri(),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=SECONDS),
                )
                answer = function(*arguments)
                dist.destroy_process_group()
                pipe.send((answer if rank == 0 else None, ""))
                del answer
                gc.collect()
            except BaseException:
                pipe.send((None, traceback.format_exc()))
