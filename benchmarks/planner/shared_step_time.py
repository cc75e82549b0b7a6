"""Steps of ranks that share a training on this CPU, as the planner predicts them and as they are.

Part of `benchmarks.planner.cpu_step_time`, which is given `--ranks`: random networks of a space under every way to
hold the dense part, with the tables that the plan places on the ranks.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.shared.machine_and_tables import markdown
from dhen.model import build_model
from search.config import StudyConfig
from search.dataset import open_log
from search.log_config import DemoConfig
from trials.cluster.cluster import Cluster
from trials.data.cache import Split
from trials.data.loader import train_batches
from trials.distributed.process_group import join
from trials.job import Job
from trials.memory.limit import limited_memory
from trials.memory.malloc import keep_freed_memory
from trials.planner.pricing import pricing_of
from trials.ranks import Ranks
from trials.strategy import named
from trials.training.distributed_step import DistributedStep

WARM_UP, STEPS, DIFFERENT_BATCHES = 3, 7, 5
ROUNDS = 2
ENOUGH = 2**40
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A network at a batch size, held in one way."""

    number: int
    batch: int
    job: Job
    strategy: str
    predicted_ms: float
    before_ms: float
    """Milliseconds as predicted without what ranks take beside their parts."""


def cases(jobs: Sequence[tuple[int, int, Job]], strategies: Sequence[str], cluster: Cluster) -> list[Case]:
    """Returns every job under every strategy, priced."""
    assert cluster.part_costs is not None
    before = cluster.replace(part_costs=cluster.part_costs.replace(shared=None))
    found = []
    for number, batch, job in jobs:
        prices, prices_before = pricing_of(job, cluster), pricing_of(job, before)
        for name in strategies:
            both = (1e3 * prices.time(named(name)).total, 1e3 * prices_before.time(named(name)).total)
            found.append(Case(number, batch, job, name, *both))
    return found


def measured(found: list[Case], cluster: Cluster, options: Namespace) -> list[tuple[float, ...]]:
    """Returns the milliseconds of each case's step in each round, on fresh ranks."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (found, cluster, options, folder)
        started = [context.Process(target=_on_rank, args=(rank, *arguments)) for rank in range(cluster.ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        assert [process.exitcode for process in started] == [0] * cluster.ranks
        return [tuple(row) for row in np.load(Path(folder) / "rounds.npy").T]


def _on_rank(rank: int, found: list[Case], cluster: Cluster, options: Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    ranks = Ranks(rank, cluster.hosts, cluster.gpus_per_host)
    join(ranks, Path(folder), None, seconds=600)
    split = open_log(StudyConfig(demo=DemoConfig(rows=options.rows))).split("train")
    rounds = [[_step_ms(case, ranks, cluster, split, options) for case in found] for _ in range(ROUNDS)]
    if ranks.first:
        np.save(Path(folder) / "rounds.npy", np.array(rounds))
    dist.barrier()
    # gloo's threads can end the process with `terminate called` while the interpreter is taken down
    os._exit(0)


def _step_ms(case: Case, ranks: Ranks, cluster: Cluster, split: Split, options: Namespace) -> float:
    batches = train_batches(split, batch_size=case.batch, seed=0, epoch=0, rank=ranks.rank, ranks=ranks.world)
    several, seconds = list(islice(batches, DIFFERENT_BATCHES)), []
    with limited_memory(ENOUGH if options.counted else None, CPU):
        model = build_model(case.job.model, case.job.features).train()
        step = DistributedStep(model, case.job, named(case.strategy), ranks, cluster, where=CPU)
        for batch in islice(cycle(several), WARM_UP + STEPS):
            began = time.perf_counter()
            step(batch)
            seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds[WARM_UP:])


def print_tables(found: list[Case], rounds: list[tuple[float, ...]]) -> None:
    """Prints a row for each case, then how far predictions are off by strategy and over all."""
    steps = [sum(each) / len(each) for each in rounds]
    rows = [
        (
            case.number,
            case.batch,
            case.strategy,
            f"{ms:.1f}",
            f"{case.predicted_ms:.1f}",
            f"{case.predicted_ms / ms - 1:+.0%}",
        )
        for case, ms in zip(found, steps, strict=True)
    ]
    print(markdown(("network", "batch", "strategy", "step, ms", "predicted", "off by"), rows))
    again = [max(each) / min(each) - 1 for each in rounds]
    now = [abs(case.predicted_ms / ms - 1) for case, ms in zip(found, steps, strict=True)]
    before = [abs(case.before_ms / ms - 1) for case, ms in zip(found, steps, strict=True)]
    by_strategy = [
        (
            name,
            *(_words(errors, [case.strategy == name for case in found]) for errors in (again, now, before)),
        )
        for name in dict.fromkeys(case.strategy for case in found)
    ]
    everything = ("all", *(_words(errors, [True] * len(found)) for errors in (again, now, before)))
    print()
    head = ("strategy", "the same step again", "predicted", "without what ranks take beside parts")
    print(markdown(head, [*by_strategy, everything]), flush=True)


def _words(errors: Sequence[float], counted: Sequence[bool]) -> str:
    its = [error for error, counts in zip(errors, counted, strict=True) if counts]
    return f"{median(its):.1%}, {np.percentile(its, 95):.1%}"
