"""An accelerator's training step: examples a second, share of its bf16 peak, memory against the plan.

A small model (the baseline, bound by launching kernels) and a large DHEN (eight layers, bound by matmuls).
Steps run under CUDA's sync debug mode: an operation that makes the host wait is an error. Batches come
from pinned memory through a thread, as in training. A training step counts as three forward passes.

    python benchmarks/gpu.py [--steps 100] [--batch 8192] [--width 1024]
    python benchmarks/gpu.py --device cpu --steps 3 --batch 64 --width 32     checks the script alone
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from common import TRAINING_FLOPS, machine, markdown

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import headline_flops
from dhen.model import build_model, model_cost, named_model, parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.load import load_cluster
from trials.data.loader import Batch
from trials.data.prefetch import on_device
from trials.hardware import matmul_peak
from trials.job import TrainingConfig
from trials.planner.plan import plan
from trials.step import TrainStep

TABLES, TABLE_ROWS, NUMERIC = 26, 100_000, 13
WARM_STEPS, REPEATS = 10, 5


def schema(table_rows: int) -> FeatureSchema:
    tables = tuple(Table(name=f"t{i}", rows=table_rows) for i in range(TABLES))
    return FeatureSchema(tables=tables, numeric=tuple(f"n{i}" for i in range(NUMERIC)))


def models(width: int) -> dict[str, ModelConfig]:
    layer = {
        "modules": [{"kind": "dlrm", "mlp": [width, width]}, {"kind": "dcn_v2", "layers": 2}],
        "out_embeddings": 16,
        "ensemble": "concat",
    }
    large = {"embedding_dim": 64, "layers": [layer] * 8, "dropout": 0.1}
    return {
        "AdvancedDLRM": named_model("advanced_dlrm"),
        f"8-layer DHEN, MLPs of {width}": parse_model(large, "benchmark"),
    }


def batches(features: FeatureSchema, size: int) -> Iterator[Batch]:
    """The same few batches again and again, from ordinary memory."""
    kept = [
        Batch(
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


def measure(
    config: ModelConfig,
    features: FeatureSchema,
    where: torch.device,
    options: argparse.Namespace,
    *,
    compiled: bool,
) -> tuple[float, float, float, float]:
    """(examples a second, GiB allocated and reserved at the peak, seconds of the first steps)."""
    torch.manual_seed(0)
    model = build_model(config, features).to(where).train()
    if compiled:
        for layer in getattr(model, "layers", [model.get_submodule("mlp")] if hasattr(model, "mlp") else []):
            layer.compile(dynamic=False)
    step = TrainStep(model, TrainingConfig(epochs=1).resolved(10**6, "bf16"))
    stream = on_device(batches(features, options.batch), where)
    began = time.perf_counter()
    for _ in range(WARM_STEPS):
        step(next(stream))
    _wait(where)
    first = time.perf_counter() - began
    speeds = []
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    for _ in range(REPEATS):
        began = time.perf_counter()
        with _waiting_is_an_error(where):
            for _ in range(options.steps):
                step(next(stream))
        _wait(where)
        speeds.append(options.batch * options.steps / (time.perf_counter() - began))
    cuda = where.type == "cuda"
    allocated = torch.cuda.max_memory_allocated(where) if cuda else 0
    reserved = torch.cuda.max_memory_reserved(where) if cuda else 0
    return statistics.median(speeds), allocated / 2**30, reserved / 2**30, first


def planned_gib(config: ModelConfig, features: FeatureSchema, batch: int) -> float:
    """What the planner says that plain DP on one such device allocates, without context and reserve."""
    cluster = load_cluster("h200").with_ranks("1x1")
    training = TrainingConfig(batch_size=batch, precision="bf16")
    memory = plan(config, features, training, cluster).strategies[0].memory
    return (memory.total - memory.context - memory.reserve) / 2**30


@contextmanager
def _waiting_is_an_error(where: torch.device) -> Iterator[None]:
    """No operation may make the host wait for the accelerator."""
    if where.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no accelerator here; --device cpu checks the script alone")
    where = torch.device(options.device)
    features = schema(TABLE_ROWS if where.type == "cuda" else 1000)
    peak = matmul_peak(8192 if where.type == "cuda" else 1024).bf16
    rows = []
    for name, config in models(options.width).items():
        flops = headline_flops(model_cost(config, features))
        for compiled in (False, True) if where.type == "cuda" else (False,):
            speed, allocated, reserved, first = measure(config, features, where, options, compiled=compiled)
            share = TRAINING_FLOPS * flops * speed / peak
            way = "compiled" if compiled else "eager"
            numbers = [f"{flops:,.0f}", f"{speed:,.0f}", f"{share:.1%}"]
            memory = [
                f"{gib:.3f}" for gib in (planned_gib(config, features, options.batch), allocated, reserved)
            ]
            rows.append([name, way, *numbers, *memory, f"{first:.1f}"])
            print(" | ".join(rows[-1]), flush=True)
    print(machine() + (f", {torch.cuda.get_device_name()}" if where.type == "cuda" else ""))
    print(f"batch {options.batch:,}; bf16 matmul peak {peak / 1e12:,.1f} TFLOP/s")
    header = [
        "model",
        "layers",
        "FLOPs an example",
        "examples/s",
        "share of the bf16 peak",
        "GiB planned",
        "GiB allocated",
        "GiB reserved",
        "s to warm up",
    ]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
