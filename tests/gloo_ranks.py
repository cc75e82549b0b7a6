"""Runs a script as several gloo ranks, each a process of its own; rank 0's answer comes back.

A script calls `as_rank(answer)` where it is the main program; its tests call `on_ranks(__file__, 2, tmp_path)`.
The processes are forked from the fork server that trainings have, so torch and TorchRec are imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trials.processes.launcher import Launcher

SECONDS = 600


class Script:
    """A script that runs in a process of its own; what it prints goes into a file."""

    def __init__(self, path: str, output: Path, **variables: str) -> None:
        Launcher(several_ranks=True).warm_up()
        self._output = output
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(path, str(output), dict(os.environ) | variables), daemon=True
        )
        self._process.start()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> tuple[int | None, str]:
        """Its exit code and what it printed, once it has ended; one that does not is killed."""
        self._process.join(SECONDS)
        self.kill()
        self._process.join()
        return self._process.exitcode, self._output.read_text() if self._output.exists() else ""


def on_ranks(script: str, ranks: int, folder: Path) -> Any:
    """What the script's `as_rank` was given on rank 0, through JSON."""
    ends = [running.end() for running in [start(script, rank, ranks, folder) for rank in range(ranks)]]
    for code, output in ends:
        assert code == 0, output
    return json.loads((folder / "answer.json").read_text())


def start(script: str, rank: int, ranks: int, folder: Path) -> Script:
    """One of the ranks; the caller sees to its end."""
    variables = {"RANK": str(rank), "RANKS": str(ranks), "FOLDER": str(folder)}
    return Script(script, folder / f"rank{rank}.log", **variables)


def _run(path: str, output: str, variables: dict[str, str]) -> None:
    """In the forked process: the script as the main program, warnings as errors."""
    with Path(output).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= variables
    warnings.simplefilter("error")
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def as_rank(answer: Callable[[], Any]) -> None:
    """Joins the others, and keeps the answer where this is rank 0."""
    folder = Path(os.environ["FOLDER"])
    dist.init_process_group(
        "gloo",
        init_method=(folder / "ranks").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["RANKS"]),
        timeout=timedelta(seconds=SECONDS),
    )
    found = answer()
    if dist.get_rank() == 0:
        (folder / "answer.json").write_text(json.dumps(found))
    dist.destroy_process_group()
