"""Training steps as the planner predicts them for one thread of this CPU, and as they are.

Networks of a space at several batch sizes, in CPU seconds of the thread that trains, so that a busy machine
disturbs little. `OPERATION_SECONDS` and `LAYER_MEMORY_SHARE` (trials/planner/device_constants.py) are read off it:
the first from forward at 16 examples per step, the second from what forward grows by from 256 to 2048.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.cpu_step_time --rows 40000 --networks 8
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import NamedTuple

import torch

from dhen.model import build_model
from search.config import DemoConfig, StudyConfig
from search.dataset import open_log
from search.execution.jobs import job_on
from spaces.catalog_loader import load_space
from trials.cluster.cluster import Cluster, PeakFlops
from trials.cluster.here import COPIED_BYTES, CPU_MATMUL
from trials.cluster.load import THIS, load_cluster
from trials.cluster.machine import preferred_precision
from trials.data.cache import PreparedLog
from trials.data.loader import train_batches
from trials.job import Job, TrainingConfig
from trials.planner.plan import plan
from trials.planner.segments import segments
from trials.training.local_step import TrainStep

BATCHES = (16, 256, 2048)
WARM_UP, STEPS = 2, 8
FACTOR = 4.0
"""By which no measured step is off: it says that no unit is wrong, however busy the machine."""


class Measured(NamedTuple):
    """Of one network at one batch size."""

    operations: int
    traffic_bytes: int
    forward_seconds: float
    step_seconds: float
    predicted_forward_seconds: float
    predicted_step_seconds: float


def main() -> None:
    """Prints a row for each network and batch size, then what follows for the constants."""
    options = _options()
    torch.set_num_threads(1)
    config = StudyConfig(demo=DemoConfig(rows=options.rows))
    log, cluster, space = open_log(config), _one_thread(load_cluster(THIS)), load_space(options.space)
    points = [space.random_point(rng) for rng in [random.Random(0)] for _ in range(options.networks)]
    found: dict[int, list[Measured]] = {batch_size: [] for batch_size in options.batches}
    print(f"peaks {cluster.peak_flops}, copies {cluster.memory_bandwidth / 1e9:.1f} GB/s")
    print(
        "| network | batch | operations | forward, ms (predicted) | step, ms (predicted) |\n|" + " --- |" * 5
    )
    for number, point in enumerate(points):
        candidate = space.decode(point)
        for batch_size in options.batches:
            training = TrainingConfig.model_validate({**candidate.training, "batch_size": batch_size})
            job = job_on(log, candidate.model, training, 0, options.precision)
            found[batch_size].append(_measured(job, log, cluster))
            _print(number, batch_size, found[batch_size][-1])
    _print_constants(found, cluster)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--space", default="default")
    parser.add_argument("--networks", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs=3, default=BATCHES, help="small, middle and large")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=preferred_precision())
    return parser.parse_args()


def _one_thread(machine: Cluster) -> Cluster:
    """This machine with the speeds of one thread, in CPU seconds as well."""
    from_F, to_F = torch.ones(COPIED_BYTES // 4), torch.empty(COPIED_BYTES // 4)
    copied = min(_seconds(to_F.copy_, from_F) for _ in range(STEPS))
    peaks = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.ones(CPU_MATMUL, CPU_MATMUL, dtype=dtype)
        peaks[name] = 2.0 * CPU_MATMUL**3 / min(_seconds(torch.mm, a, a) for _ in range(STEPS))
    changes = {"memory_bandwidth": 2.0 * COPIED_BYTES / copied, "peak_flops": PeakFlops(**peaks)}
    return machine.replace(**changes)


def _measured(job: Job, log: PreparedLog, cluster: Cluster) -> Measured:
    training = job.training
    assert training.batch_size is not None
    assert training.precision != "auto"
    best = plan(job.model, job.features, training, cluster).best
    assert best is not None
    its = segments(job.model, job.features, training.precision, "cpu", training.batch_size)
    model = build_model(job.model, job.features).train()
    step = TrainStep(model, training)
    order = train_batches(log.split("train"), batch_size=training.batch_size, seed=0, epoch=0)
    batches = list(islice(order, WARM_UP + STEPS))
    for batch in batches[:WARM_UP]:
        step(batch)
    return Measured(
        operations=sum(segment.operations for segment in its),
        traffic_bytes=sum(segment.footprint.traffic for segment in its),
        forward_seconds=min(_seconds(model, batch.features) for batch in batches[WARM_UP:]),
        step_seconds=median(_seconds(step, batch) for batch in batches[WARM_UP:]),
        predicted_forward_seconds=best.time.forward,
        predicted_step_seconds=best.time.total,
    )


def _seconds(run: Callable[..., object], *given: object) -> float:
    """Of the CPU, in this thread and, for backward, in autograd's, which is this one on a CPU."""
    before = time.thread_time()
    run(*given)
    return time.thread_time() - before


def _print(number: int, batch_size: int, found: Measured) -> None:
    forward = f"{1e3 * found.forward_seconds:.2f} ({1e3 * found.predicted_forward_seconds:.2f})"
    step = f"{1e3 * found.step_seconds:.2f} ({1e3 * found.predicted_step_seconds:.2f})"
    print(f"| {number} | {batch_size} | {found.operations} | {forward} | {step} |", flush=True)


def _print_constants(found: dict[int, list[Measured]], cluster: Cluster) -> None:
    small, middle, large = found.values()
    starts = median(each.forward_seconds / each.operations for each in small)
    reached = median(
        (after.traffic_bytes - before.traffic_bytes) / (after.forward_seconds - before.forward_seconds)
        for before, after in zip(middle, large, strict=True)
    )
    ratios = [each.step_seconds / each.predicted_step_seconds for rows in found.values() for each in rows]
    off = median(abs(ratio - 1) for ratio in ratios)
    most = max(max(ratio, 1 / ratio) for ratio in ratios)
    print(f"\nforward at {min(found)} examples: {1e6 * starts:.0f} us an operation")
    print(f"growth of forward: {reached / 1e9:.1f} GB/s, {reached / cluster.memory_bandwidth:.2f} of copies")
    print(f"measured steps are off from predicted ones by {off:.0%} (median)")
    verdict = "holds" if most < FACTOR else "does NOT hold"
    print(f"within a factor of {FACTOR:g}: {verdict} (at most {most:.1f})")


if __name__ == "__main__":
    main()
