"""How far planned peaks are from what real ranks hold: every way of holding, tables included, on 2 and 4 ranks.

Each rank makes three training steps of a DHEN under each strategy, over gloo, and counts tensors one by one, as a
training with a declared memory does; the fullest rank stands beside the plan. By default weights are large enough
that every peak is above 64 MiB on every rank. What is no tensor is left out: gloo's own buffers, the interpreter.
So is evaluation.

    python -m benchmarks.planner.plans_on_ranks
        each technique by itself and all together, in both precisions
    python -m benchmarks.planner.plans_on_ranks --ranks 2 --strategies zero2 fsdp+micro_batches=4
        these strategies
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.planner.memory_and_latency import random_batch
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import build_model, parse_model
from dhen.ops.dropout import pools
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.load import load_cluster
from trials.cluster.machine import Precision
from trials.job import Job, TrainingConfig
from trials.memory.limit import limited_memory, on_host
from trials.planner.ladder import ladder
from trials.planner.pricing import pricing_of
from trials.ranks import Ranks
from trials.strategy import Strategy, named
from trials.training.distributed_step import DistributedStep

SHAPES = {2: (1, 2), 4: (2, 2)}
"""Hosts and ranks per host."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
MICRO_BATCHES = (1, 4)
STEPS = 3
"""The first one makes the optimizer's state, the second orders DistributedDataParallel's buckets."""
CPU, ENOUGH = torch.device("cpu"), 2**36
SCHEMA = FeatureSchema(
    tables=(
        *(Table(name=f"c{index}", rows=20_000) for index in range(8)),
        Table(name="bag", rows=500, multi_hot=True, mean_ids=3),
    ),
    numeric=("x", "y", "z"),
)


class Size(NamedTuple):
    """What is trained, and how much of it."""

    layers: int
    width: int
    """Width of the modules' MLPs."""
    examples: int
    """Examples per rank."""


class Finding(NamedTuple):
    """One strategy on so many ranks, in bytes."""

    ranks: int
    precision: Precision
    strategy: str
    planned: int
    planned_at: str
    held: int

    @property
    def error(self) -> float:
        """Percent by which the plan is above what was held."""
        return 100 * (self.planned / self.held - 1)


def job(size: Size, precision: Precision, world: int) -> Job:
    layer = {"modules": [{"kind": "mlp", "mlp": [size.width] * 2}, "dlrm"], "out_embeddings": 16}
    model = parse_model({"embedding_dim": 32, "layers": [layer] * size.layers, "dropout": 0.1}, "model")
    training = TrainingConfig(batch_size=size.examples * world, precision=precision, epochs=1)
    resolved = training.resolved(10**6, precision)
    return Job(model=model, features=SCHEMA, log="none", training=resolved, seed=0)


def cluster(world: int) -> Cluster:
    """Links as those of a pod, and no context of a device: tables lie where they would there."""
    data = load_cluster("zionex").to_dict() | {"device": "cpu", "sources": {}}
    return Cluster.model_validate(data).with_ranks("x".join(map(str, SHAPES[world]))).with_hbm(ENOUGH)


def strategies(world: int, examples: int) -> Iterator[Strategy]:
    """Each technique by itself; of each way of holding, with micro-batches, and with all that goes with it."""
    found = [rung for rung in ladder(*SHAPES[world], examples) if rung.micro_batches in MICRO_BATCHES]
    for dense in dict.fromkeys(strategy.dense for strategy in found):
        its = [strategy for strategy in found if strategy.dense == dense]
        plain = 0 if dense == "dp" else 1
        for strategy in its:
            if len(strategy.techniques) <= plain + 1 or strategy == its[-1]:
                yield strategy


def on_rank(rank: int, world: int, size: Size, names: tuple[str, ...], folder: str) -> None:
    """Measures every strategy with the other ranks; rank 0 writes the findings down."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
    )
    ranks, where = Ranks(rank, *SHAPES[world]), cluster(world)
    lines = []
    for precision in PRECISIONS:
        chosen = tuple(map(named, names)) or tuple(strategies(world, size.examples))
        for strategy in chosen:
            its = job(size, precision, world)
            memory = pricing_of(its, where).memory(strategy)
            peak = torch.tensor(step_bytes(its, strategy, ranks, where, size.examples))
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            numbers = (world, precision, strategy.name, memory.total, memory.peak_at, int(peak))
            lines.append("\t".join(map(str, numbers)))
    if ranks.first:
        (Path(folder) / "findings").write_text("\n".join(lines))
    dist.barrier()
    os._exit(
        0
    )  # gloo's threads can end the process with `terminate called` while the interpreter is taken down


def step_bytes(job: Job, strategy: Strategy, ranks: Ranks, cluster: Cluster, examples: int) -> int:
    """Returns the most that this rank has held, as a training with a declared memory counts it."""
    torch.manual_seed(0)
    pools()
    with limited_memory(ENOUGH, CPU) as peak_bytes:
        with on_host():
            model = build_model(job.model, job.features).train()
        step = DistributedStep(model, job, strategy, ranks, cluster, where=CPU)
        del model
        batch = random_batch(job.features, examples)
        for _ in range(STEPS):
            step(batch)
        return peak_bytes()


def measured(world: int, size: Size, names: tuple[str, ...] = ()) -> list[Finding]:
    """Returns the findings on so many fresh ranks, for strategies of these names or for each technique."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=on_rank, args=(rank, world, size, names, folder)) for rank in range(world)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        assert [process.exitcode for process in started] == [0] * world
        lines = (Path(folder) / "findings").read_text().splitlines()
    found = []
    for line in lines:
        ranks, precision, strategy, planned, planned_at, held = line.split("\t")
        known = next(name for name in PRECISIONS if name == precision)
        found.append(Finding(int(ranks), known, strategy, int(planned), planned_at, int(held)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--examples", type=int, default=2048, help="per rank")
    parser.add_argument("--strategies", nargs="+", default=(), help="names, in place of each technique")
    options = parser.parse_args()
    size = Size(options.layers, options.width, options.examples)
    found = [
        finding for world in options.ranks for finding in measured(world, size, tuple(options.strategies))
    ]
    rows = [
        (f.ranks, f.precision, f.strategy, f"{f.held / 2**20:.1f}", f"{f.error:+.2f}", f.planned_at)
        for f in found
    ]
    print(f"{machine()}\n")
    print(markdown(("ranks", "precision", "strategy", "MiB held", "plan %", "planned at"), rows))
    sizes = sorted(abs(finding.error) for finding in found)
    last = sizes[min(round(0.95 * len(sizes)), len(sizes) - 1)]
    least = min(finding.held for finding in found) / 2**20
    print(
        f"\n{len(found)} peaks of at least {least:.1f} MiB: median |error| {statistics.median(sizes):.2f} %, "
        f"95th percentile {last:.2f} %, {min(f.error for f in found):+.2f} to "
        f"{max(f.error for f in found):+.2f} %"
    )


if __name__ == "__main__":
    main()
