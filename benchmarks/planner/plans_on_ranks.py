"""How far planned peaks are from what real ranks hold: every way of holding, tables included, on 2 and 4 ranks.

Each rank trains a DHEN on the built-in log under each strategy, over gloo: it takes the model over, makes three
steps, evaluates and hands out its weights. It counts tensors one by one, as a training with a declared memory
does; the fullest rank stands beside the plan. What is no tensor is left out: the interpreter, gloo's own memory.

By default strategies are chosen until every two of these have met: precision, way of holding, checkpointing,
offload, micro-batches and `no_sync`; and weights are so large that every peak is above 64 MiB on every rank.

    python -m benchmarks.planner.plans_on_ranks
        these strategies, first on 2, then on 4 ranks
    python -m benchmarks.planner.plans_on_ranks --ranks 2 --strategies zero2 fsdp+micro_batches=4
        these strategies, in both precisions
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import build_model, parse_model
from dhen.ops.norm import pools
from trials.cluster.cluster import Cluster
from trials.cluster.machine import Precision
from trials.cluster.this_machine import load_cluster
from trials.data.demo import DemoLog
from trials.data.demo.generate import generate
from trials.data.loader import train_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.planner.ladder import ladder
from trials.planner.pricing import pricing_of
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy, named
from trials.training.distributed_step import DistributedStep
from trials.training.memory_limit import limited_memory, on_host

SHAPES = {2: (1, 2), 4: (2, 2)}
"""Hosts and ranks per host."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
MICRO_BATCHES = (1, 4)
STEPS = 3
"""The first one makes the optimizer's state, the second orders DistributedDataParallel's buckets."""
CPU, ENOUGH = torch.device("cpu"), 2**36
TRAIN_SHARE = 0.75
"""At least this share of the log's rows is for training."""


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


class Case(NamedTuple):
    """What is planned and measured."""

    precision: Precision
    strategy: Strategy

    @property
    def pairs(self) -> frozenset[tuple[object, ...]]:
        """Every two of the case's settings."""
        strategy = self.strategy
        settings = (
            ("precision", self.precision),
            ("tensor", strategy.tensor),
            ("dense", strategy.dense),
            ("checkpointing", strategy.checkpointing),
            ("offload", strategy.offload),
            ("accumulation", (strategy.micro_batches, strategy.no_sync)),
        )
        return frozenset(combinations(settings, 2))


def covering(cases: Iterable[Case]) -> list[Case]:
    """Returns so many cases that every two settings which one case has, one of those chosen has: always the case
    with the most pairs that have not been there."""
    candidates, chosen = list(cases), []
    missing = set[tuple[object, ...]]().union(*(case.pairs for case in candidates))
    while missing:
        best = max(candidates, key=lambda case: len(missing & case.pairs))
        chosen.append(best)
        missing -= best.pairs
    return chosen


def cases(world: int, examples: int, names: tuple[str, ...]) -> list[Case]:
    """Returns the strategies of these names in both precisions, or a choice of the whole ladder."""
    if names:
        return [Case(precision, named(name)) for precision in PRECISIONS for name in names]
    found = [rung for rung in ladder(*SHAPES[world], examples) if rung.micro_batches in MICRO_BATCHES]
    return covering(Case(precision, rung) for precision in PRECISIONS for rung in found)


def job(log: PreparedLog, size: Size, precision: Precision, world: int) -> Job:
    layer = {"modules": [{"kind": "mlp", "mlp": [size.width] * 2}, "dlrm"], "out_embeddings": 16}
    model = parse_model({"embedding_dim": 32, "layers": [layer] * size.layers, "dropout": 0.1}, "model")
    training = TrainingConfig(batch_size=size.examples * world, precision=precision, epochs=1)
    resolved = training.resolved(10**6, precision)
    return Job(model=model, features=log.features, log=log.fingerprint, training=resolved, seed=0)


def cluster(world: int) -> Cluster:
    """Links as those of a pod, and no context of a device: tables lie where they would there."""
    data = load_cluster("zionex").to_dict() | {"device": "cpu", "sources": {}}
    return Cluster.model_validate(data).with_ranks("x".join(map(str, SHAPES[world]))).with_hbm(ENOUGH)


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
    log, lines = PreparedLog.open(Path(folder) / "log"), []
    for precision, strategy in cases(world, size.examples, names):
        its = job(log, size, precision, world)
        memory = pricing_of(its, where).memory(strategy)
        peak = torch.tensor(training_bytes(its, log, strategy, ranks, where))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        numbers = (world, precision, strategy.name, memory.total, memory.peak_at, int(peak))
        lines.append("\t".join(map(str, numbers)))
    if ranks.first:
        (Path(folder) / "findings").write_text("\n".join(lines))
    dist.barrier()
    # gloo's threads can end the process with `terminate called` while the interpreter is taken down
    os._exit(0)


def training_bytes(job: Job, log: PreparedLog, strategy: Strategy, ranks: Ranks, cluster: Cluster) -> int:
    """Returns the most that this rank has held, as a training with a declared memory counts it."""
    assert job.training.batch_size is not None
    torch.manual_seed(0)
    pools()
    with limited_memory(ENOUGH, CPU) as peak_bytes:
        with on_host():
            model = build_model(job.model, job.features).train()
        step = DistributedStep(model, job, strategy, ranks, cluster, where=CPU)
        del model
        batches = train_batches(
            log.split("train"),
            batch_size=job.training.batch_size,
            seed=0,
            epoch=0,
            rank=ranks.rank,
            ranks=ranks.world,
        )
        for batch, _following in pairwise(islice(batches, STEPS + 1)):  # the loop has the next batch too
            step(batch)
        del batch, _following
        step.settle()
        step.is_finite()
        step.evaluate(log, "validation")
        with on_host():
            step.weights()
        return peak_bytes()


def demo_log(folder: Path, rows: int) -> None:
    """Prepares the built-in log, with so many rows to train on at least."""
    raw = generate(DemoLog(rows=round(rows / TRAIN_SHARE), seed=0), folder / "demo.parquet")
    prepare([raw], out=folder / "log")


def measured(world: int, size: Size, names: tuple[str, ...] = ()) -> list[Finding]:
    """Returns the findings on so many fresh ranks, for strategies of these names or for each technique."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        demo_log(Path(folder), (STEPS + 1) * size.examples * world)
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
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--examples", type=int, default=512, help="per rank")
    parser.add_argument("--strategies", nargs="+", default=(), help="names, in place of a choice")
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
