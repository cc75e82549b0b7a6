"""Runs a script as several gloo ranks, each a process of its own; rank 0's answer comes back.

A script calls `as_rank(answer)` where it is the main program; its tests call `on_ranks(__file__, 2, tmp_path)`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parent.parent
SECONDS = 600


def on_ranks(script: str, ranks: int, folder: Path) -> Any:
    """What the script's `as_rank` was given on rank 0, through JSON."""
    running = [start(script, rank, ranks, folder) for rank in range(ranks)]
    outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output
    return json.loads((folder / "answer.json").read_text())


def start(script: str, rank: int, ranks: int, folder: Path) -> subprocess.Popen[str]:
    """One of the ranks; the caller sees to its end."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return subprocess.Popen(
        [sys.executable, "-W", "error", script],
        env=os.environ
        | {"PYTHONPATH": paths, "RANK": str(rank), "RANKS": str(ranks), "FOLDER": str(folder)}
        | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
