"""Training steps as the planner predicts them for this CPU, and as they are.

Random networks of a space at several batch sizes, trained on the generated demo log in so many processes at the
same time, as trials side by side are. Predictions rest on what parts of models were measured to take here
(`trials.profiling`), which never looks at these networks; where costs of parts are kept from an earlier
measurement they serve, as they do in a study, and DHEN_SEARCH_CACHE with an empty folder has them measured anew.
Each network is measured in two rounds that lie apart:
how far these differ is how well a step repeats.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.cpu_step_time --space default --networks 12 --processes 1
    OMP_NUM_THREADS=1 python -m benchmarks.planner.cpu_step_time --networks 4 --ranks 1x2
        ranks that share a training, under each strategy (`benchmarks.planner.shared_step_time`)
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from statistics import mean, median
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.planner.shared_step_time import ENOUGH, cases, measured, print_tables
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import build_model
from search.config import StudyConfig
from search.dataset import open_log
from search.execution.jobs import job_on
from search.log_config import DemoConfig
from search.planning.plan_trial import declared_cluster
from spaces.catalog_loader import load_space
from trials.cluster.cluster import Cluster
from trials.cluster.load import THIS, load_cluster
from trials.cluster.machine import preferred_precision
from trials.cluster.shared import shared
from trials.data.cache import Split
from trials.data.loader import train_batches
from trials.job import Job, TrainingConfig
from trials.memory.malloc import keep_freed_memory
from trials.planner.plan import plan
from trials.profiling.kept import part_costs
from trials.training.local_step import TrainStep

STRATEGIES = ("dp", "zero1", "zero2", "shard_grad_op", "fsdp")
BATCHES = (256, 1024, 4096)
WARM_UP, STEPS, DIFFERENT_BATCHES = 3, 7, 5
ROUNDS = 2


class Case(NamedTuple):
    """A network at a batch size."""

    number: int
    batch: int
    job: Job
    predicted_ms: float
    rooflined_ms: float
    """Milliseconds of a step as predicted without measured parts."""


def main() -> None:
    """Prints a row for each network and batch size, then how far predictions and rounds are off."""
    options = _options()
    torch.set_num_threads(options.threads)
    if options.ranks is not None:
        return _shared(options)
    say = partial(print, file=sys.stderr)
    costs = part_costs(options.precision, threads=options.threads, processes=options.processes, say=say)
    print(machine())
    print(
        f"{options.precision}, {options.processes} processes of {options.threads} threads, {options.space}\n"
    )
    rooflined = shared(load_cluster(THIS), options.processes, options.threads)
    cases = _cases(options, rooflined.replace(part_costs=costs), rooflined)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        jobs = [case.job for case in cases]
        rounds = [
            np.mean(
                [*pool.map(_measured_ms, *zip(*[(jobs, options)] * options.processes, strict=True))], axis=0
            )
            for _ in range(ROUNDS)
        ]
    _print_table(cases, rounds)


def _shared(options: argparse.Namespace) -> None:
    """Prints how far predictions of shared trainings are off."""
    began = time.perf_counter()
    cluster = declared_cluster(
        THIS,
        options.ranks,
        ENOUGH if options.counted else None,
        threads=options.threads,
        precision=options.precision,
    )
    print(f"{machine()}; read or measured in {time.perf_counter() - began:.0f} s")
    counted = ", memory counted" if options.counted else ""
    print(
        f"{options.precision}, {options.ranks} ranks of {options.threads} threads, {options.space}{counted}\n"
    )
    found = cases(list(_jobs(options)), options.strategies, cluster)
    print_tables(found, measured(found, cluster, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--space", default="default")
    parser.add_argument("--networks", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=preferred_precision())
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--processes", type=int, default=1, help="that train at the same time")
    parser.add_argument("--ranks", help="that share a training, such as 1x2")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="with --ranks")
    parser.add_argument("--counted", action="store_true", help="with --ranks: as with a declared memory")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _cases(options: argparse.Namespace, cluster: Cluster, rooflined: Cluster) -> list[Case]:
    return [
        Case(number, batch, job, _predicted_ms(job, cluster), _predicted_ms(job, rooflined))
        for number, batch, job in _jobs(options)
    ]


def _jobs(options: argparse.Namespace) -> Iterator[tuple[int, int, Job]]:
    """Yields random networks at every batch size."""
    log, space = open_log(StudyConfig(demo=DemoConfig(rows=options.rows))), load_space(options.space)
    rng = random.Random(options.seed)
    for number in range(options.networks):
        candidate = space.decode(space.random_point(rng))
        for batch in options.batches:
            training = TrainingConfig.model_validate({**candidate.training, "batch_size": batch})
            yield number, batch, job_on(log, candidate.model, training, 0, options.precision)


def _predicted_ms(job: Job, cluster: Cluster) -> float:
    best = plan(job.model, job.features, job.training, cluster).best
    assert best is not None
    return 1e3 * best.time.total


def _measured_ms(jobs: list[Job], options: argparse.Namespace) -> list[float]:
    """Returns the median milliseconds of each job's step, in this process."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    log = open_log(StudyConfig(demo=DemoConfig(rows=options.rows)))
    return [_step_ms(job, log.split("train")) for job in jobs]


def _step_ms(job: Job, split: Split) -> float:
    assert job.training.batch_size is not None
    step = TrainStep(build_model(job.model, job.features).train(), job.training)
    order = train_batches(split, batch_size=job.training.batch_size, seed=0, epoch=0)
    batches, seconds = list(islice(order, DIFFERENT_BATCHES)), []
    for batch in islice(cycle(batches), WARM_UP + STEPS):
        began = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - began)
    return 1e3 * median(seconds[WARM_UP:])


def _print_table(cases: list[Case], rounds: list[list[float]]) -> None:
    measured = [mean(values) for values in zip(*rounds, strict=True)]
    rows = [
        (
            case.number,
            case.batch,
            f"{ms:.1f}",
            f"{case.predicted_ms:.1f}",
            f"{case.predicted_ms / ms - 1:+.0%}",
        )
        for case, ms in zip(cases, measured, strict=True)
    ]
    print(markdown(("network", "batch", "step, ms", "predicted", "off by"), rows))
    print()
    repeated = [abs(first / second - 1) for first, second in zip(*rounds, strict=True)]
    _print_errors("the same step, measured again", cases, repeated)
    by_parts = [abs(case.predicted_ms / ms - 1) for case, ms in zip(cases, measured, strict=True)]
    _print_errors("predicted from measured parts", cases, by_parts)
    by_roofline = [abs(case.rooflined_ms / ms - 1) for case, ms in zip(cases, measured, strict=True)]
    _print_errors("predicted by the roofline", cases, by_roofline)


def _print_errors(what: str, cases: list[Case], errors: list[float]) -> None:
    """Prints median and 95th percentile, of all and by batch."""
    by_batch = {
        batch: [error for case, error in zip(cases, errors, strict=True) if case.batch == batch]
        for batch in {case.batch: None for case in cases}
    }
    words = [f"{batch}: {median(each):.1%}" for batch, each in by_batch.items()]
    print(
        f"{what}: off by {median(errors):.1%} (median), {np.percentile(errors, 95):.1%} (95th percentile), "
        f"{max(errors):.1%} (most); medians by batch {', '.join(words)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
