"""How long four ranks take to start, train ten steps, and be gone: our fork server, spawn, torchrun.

Each run is in a folder of its own and from a driver that has torch imported; on a CPU, with gloo over the
loopback interface, a thread a rank. Medians.

    python -m benchmarks.processes.rank_start_time [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from benchmarks.processes import rank_start_job as rank_job
from benchmarks.shared.machine_and_tables import machine, markdown
from trials.records.events import TrainingEvent
from trials.records.task import Task
from trials.runtime.launcher import Launcher, wait_for

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(rank_job.RANKS))
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")


def by_launcher(launcher: Launcher, folder: Path) -> None:
    task = Task(job=rank_job.JOB, log_directory="none", threads=1, gpus_per_host=rank_job.RANKS)
    run, events = launcher.launch(rank_job.ours, task, folder), []
    while not run.ended:
        wait_for([run])
        events += run.new_events()
    assert isinstance(events[-1], TrainingEvent), events


def by_spawn(folder: Path) -> None:
    spawn(rank_job.spawned, (str(folder),), nprocs=rank_job.RANKS)  # type: ignore[no-untyped-call]


def by_torchrun(folder: Path) -> None:
    command = [*TORCHRUN, *RENDEZVOUS, rank_job.__file__, str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def seconds(start: Callable[[Path], None]) -> tuple[float, float]:
    """Until all ranks have joined, and until all are gone."""
    with tempfile.TemporaryDirectory() as folder:
        began, clock = time.time(), time.perf_counter()
        start(Path(folder))
        whole = time.perf_counter() - clock
        return float((Path(folder) / rank_job.JOINED).read_text()) - began, whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = Launcher()
    rows = [
        ["fork server, the first time", *(f"{s:.2f}" for s in seconds(lambda f: by_launcher(launcher, f)))]
    ]
    ways: dict[str, Callable[[Path], None]] = {
        "fork server, warm": lambda folder: by_launcher(launcher, folder),
        "torch.multiprocessing.spawn": by_spawn,
        "torchrun": by_torchrun,
    }
    for name, start in ways.items():
        columns = zip(*(seconds(start) for _ in range(repeats)), strict=True)
        rows.append([name, *(f"{statistics.median(column):.2f}" for column in columns)])
    print(machine())
    print(
        markdown(
            ["4 ranks by", "s until all have joined", "s until 10 steps are done and all are gone"], rows
        )
    )


if __name__ == "__main__":
    main()
