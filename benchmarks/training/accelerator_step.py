"""An accelerator's training step: examples a second, share of its bf16 peak, time and memory against the plan.

The baseline (small, bound by launching kernels) and DHENs of 4, 8 and 16 layers, each held in several ways: plain
DP, eager and compiled; activation checkpointing; ZeRO-Offload, also with delayed updates; FSDP with CPU offload;
micro-batches. A DHEN's batch is the
smallest power of two whose plan for plain DP takes a tenth of the memory. Plain DP's steps run under CUDA's sync
debug mode: an operation that makes the host wait is an error. Batches come from pinned memory through a thread,
as in training. A training step counts as three forward passes, recomputation not counted.

    python -m benchmarks.training.accelerator_step [--steps 20] [--layers 4 8 16] [--width 1024]
    python -m benchmarks.training.accelerator_step --device cpu --steps 2 --layers 2 --width 32 --batch 64
        checks the script alone
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from benchmarks.shared.machine_and_tables import TRAINING_FLOPS, machine, markdown
from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import headline_flops
from dhen.model import build_model, model_cost, named_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import this_machine
from trials.data.loader import LabelledBatch, on_device
from trials.planner.estimates import PricedStrategy
from trials.planner.plan import plan
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy, named
from trials.training.compile_layers import compile_checked
from trials.training.distributed import zero_offload
from trials.training.distributed_step import DistributedStep
from trials.training.step import Step, TrainStep

TABLES, TABLE_ROWS, NUMERIC = 26, 100_000, 13
WARM_STEPS, REPEATS = 5, 5
SHARE = 0.1
"""Of the card's memory that a DHEN under plain DP fills at least."""
SMALLEST_BATCH, LARGEST_BATCH = 1024, 2**20
HELD = (
    "dp",
    "dp+micro_batches=4",
    "dp+selective_checkpointing",
    "dp+full_checkpointing",
    "zero_offload",
    "zero_offload+full_checkpointing",
    "fsdp+cpu_offload",
    "fsdp+full_checkpointing+cpu_offload",
)


class Case(NamedTuple):
    """One training to measure."""

    name: str
    model: ModelConfig
    batch: int
    strategy: Strategy
    compiled: bool
    delayed: bool = False
    """Whether the host updates while the next step runs."""


class Measured(NamedTuple):
    """What came of it; bytes are 0 where nobody counts them."""

    speed: float
    """Examples a second, median."""
    allocated_bytes: int
    reserved_bytes: int
    warm_up_seconds: float


def schema(table_rows: int) -> FeatureSchema:
    """One-hot tables of equal size, and numbers."""
    tables = tuple(Table(name=f"t{i}", rows=table_rows) for i in range(TABLES))
    return FeatureSchema(tables=tables, numeric=tuple(f"n{i}" for i in range(NUMERIC)))


def dhen(layers: int, width: int) -> ModelConfig:
    """Pairwise dots under an MLP beside DCN-V2 cross layers, as deep as wanted."""
    layer = {
        "modules": [{"kind": "dlrm", "mlp": [width, width]}, {"kind": "dcn_v2", "layers": 2}],
        "out_embeddings": 16,
        "ensemble": "concat",
    }
    return parse_model({"embedding_dim": 64, "layers": [layer] * layers, "dropout": 0.1}, "benchmark")


def training(case: Case) -> TrainingConfig:
    """Resolved; a delay begins with the first step."""
    zero_offload.DELAY_AFTER = 0  # type: ignore[attr-defined]
    config = TrainingConfig(epochs=1, batch_size=case.batch, delayed_update=case.delayed)
    return config.resolved(max(case.batch, 10**6), "bf16")


def priced(case: Case, features: FeatureSchema, cluster: Cluster) -> PricedStrategy:
    """As the planner has it on one such device."""
    found = plan(case.model, features, training(case), cluster)
    return next(each for each in found.strategies if each.strategy == case.strategy)


def batch_that_fills(model: ModelConfig, features: FeatureSchema, cluster: Cluster) -> int:
    """The smallest power of two whose plain DP takes `SHARE` of the memory."""
    batch = SMALLEST_BATCH
    while batch < LARGEST_BATCH:
        memory = priced(Case("", model, batch, Strategy(), False), features, cluster).memory
        if memory.total >= SHARE * cluster.hbm:
            break
        batch *= 2
    return batch


def cases(options: argparse.Namespace, features: FeatureSchema, cluster: Cluster) -> Iterator[Case]:
    """Compiled layers are for accelerators, and for plain DP alone, as in training."""
    eager_and_compiled = (False, True) if options.device == "cuda" else (False,)
    for compiled in eager_and_compiled:
        yield Case("AdvancedDLRM", named_model("advanced_dlrm"), options.batch or 8192, Strategy(), compiled)
    for layers in options.layers:
        model = dhen(layers, options.width)
        batch = options.batch or batch_that_fills(model, features, cluster)
        for name in HELD:
            for compiled in eager_and_compiled if name == "dp" else (False,):
                yield Case(f"{layers}-layer DHEN", model, batch, named(name), compiled)
        yield Case(f"{layers}-layer DHEN", model, batch, named("zero_offload"), False, delayed=True)


def batches(features: FeatureSchema, size: int) -> Iterator[LabelledBatch]:
    """The same few batches again and again, from ordinary memory."""
    kept = [
        LabelledBatch(
            features=FeatureBatch(
                ids_BT=torch.randint(0, features.tables[0].rows, (size, TABLES), dtype=torch.int32),
                bags=(),
                numeric_BK=torch.randn(size, NUMERIC),
            ),
            label_B=torch.randint(0, 2, (size,)).float(),
            weight_B=None,
        )
        for _ in range(4)
    ]
    return itertools.cycle(kept)


def step_of(case: Case, features: FeatureSchema, where: torch.device) -> Step:
    """As a training process makes it."""
    torch.manual_seed(0)
    model = build_model(case.model, features).train()
    if case.strategy != Strategy():
        job = Job(model=case.model, features=features, log="none", training=training(case), seed=0)
        return DistributedStep(model, job, case.strategy, Ranks(), where=where)
    if case.compiled:
        compile_checked(
            getattr(model, "layers", [model.get_submodule("mlp")] if hasattr(model, "mlp") else [])
        )
    return TrainStep(model.to(where), training(case))


def measure(case: Case, features: FeatureSchema, where: torch.device, steps: int) -> Measured:
    """Steps after a few that warm up.

    Raises:
        torch.OutOfMemoryError: if the card is too small.
    """
    cuda, speeds = where.type == "cuda", []
    held = torch.cuda.memory_allocated(where) if cuda else 0  # by cases before, whose hooks nobody collects
    step, stream = step_of(case, features, where), on_device(batches(features, case.batch), where)
    began = time.perf_counter()
    for _ in range(WARM_STEPS):
        step(next(stream))
    _wait(where)
    warm_up = time.perf_counter() - began
    if isinstance(step, TrainStep) and case.compiled and not _is_compiled(step.model):
        raise SystemExit(f"{case.name}: no layer is compiled, as the warnings above say.")
    if cuda:
        torch.cuda.reset_peak_memory_stats(where)
    for _ in range(REPEATS):
        began = time.perf_counter()
        with _waiting_is_an_error() if cuda and case.strategy == Strategy() else nullcontext():
            for _ in range(steps):
                step(next(stream))
        _wait(where)
        speeds.append(case.batch * steps / (time.perf_counter() - began))
    allocated = torch.cuda.max_memory_allocated(where) - held if cuda else 0
    reserved = torch.cuda.max_memory_reserved(where) - held if cuda else 0
    return Measured(statistics.median(speeds), allocated, reserved, warm_up)


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def row(case: Case, features: FeatureSchema, where: torch.device, steps: int, cluster: Cluster) -> list[str]:
    """The case in words; what does not fit the card says so."""
    planned = priced(case, features, cluster)
    tensors = planned.memory.total - planned.memory.context - planned.memory.reserve
    flops = headline_flops(model_cost(case.model, features))
    held = case.strategy.name + (", compiled" if case.compiled else "")
    held += ", delayed" if case.delayed else ""
    about = [case.name, f"{case.batch:,}", held, f"{flops:,.0f}"]
    try:
        found = measure(case, features, where, steps)
    except torch.OutOfMemoryError:
        return [*about, "out of memory", *["–"] * 2, f"{tensors / 2**30:.3f}", *["–"] * 3]
    share = TRAINING_FLOPS * flops * found.speed / cluster.peak_flops.bf16
    return [
        *about,
        f"{found.speed:,.0f}",
        f"{share:.1%}",
        f"{planned.time.total * found.speed / case.batch:.2f}",
        *(f"{size / 2**30:.3f}" for size in (tensors, found.allocated_bytes, found.reserved_bytes)),
        f"{found.warm_up_seconds:.1f}",
    ]


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """No operation may make the host wait for the accelerator."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def _forget(where: torch.device) -> None:
    """Frees the card for the next case; on a CPU nothing is measured that another case's memory would change."""
    if where.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _one_rank(where: torch.device) -> Iterator[None]:
    """`fully_shard` needs a process group, also of one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="of all models; by default as the text above says")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no accelerator here; --device cpu checks the script alone")
    where = torch.device(options.device)
    features = schema(TABLE_ROWS if where.type == "cuda" else 1000)
    cluster = this_machine().with_ranks("1x1")
    print(machine() + (f", {torch.cuda.get_device_name()}" if where.type == "cuda" else ""))
    print(f"bf16 matmul peak {cluster.peak_flops.bf16 / 1e12:,.1f} TFLOP/s", flush=True)
    rows = []
    with _one_rank(where):
        for case in cases(options, features, cluster):
            rows.append(row(case, features, where, options.steps, cluster))
            print(" | ".join(rows[-1]), flush=True)
            _forget(where)
    header = [
        "model",
        "batch",
        "held by",
        "FLOPs an example",
        "examples/s",
        "share of the bf16 peak",
        "step planned / measured",
        "GiB planned",
        "GiB allocated",
        "GiB reserved",
        "s to warm up",
    ]
    print(f"\n{markdown(header, rows)}")


if __name__ == "__main__":
    main()
