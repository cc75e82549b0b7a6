"""How much larger a network ZeRO-Offload lets one accelerator hold than plain DP, by the planner, and what
explains it.

For each way of holding the dense part, the deepest DHEN that fits one accelerator of the declared memory, its
parameters, and the bytes per parameter of each item of its plan. Nothing is trained and no accelerator is needed.
Bytes are those of bf16, which fp16 has as many of: a V100 computes in fp16 and has no bf16. Peaks and links of the
cluster do not enter.

    python -m benchmarks.planner.offload_depth
        31.74 GiB, as CUDA reports of a V100 of 32 GB
    python -m benchmarks.planner.offload_depth --hbm 79.1GiB --width 8192 --batch 256
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.config import ModelConfig
from dhen.cost import dense_parameters
from dhen.model import model_cost, parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster, parse_bytes
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import MemoryEstimate
from trials.planner.pricing import CostModel
from trials.records.job import TrainingConfig
from trials.records.strategy import named

CLUSTER = "a100-80gb"
"""The catalog's cluster whose memory is replaced: what is asked depends on nothing else of it but the host's
memory."""
HELD = (
    "dp",
    "dp+full_checkpointing",
    "fsdp+cpu_offload",
    "fsdp+cpu_offload+full_checkpointing",
    "zero_offload",
    "zero_offload+full_checkpointing",
)
TABLES, ROWS, NUMERIC = 8, 1000, 4
DEEPEST = 4096
ITEMS = {
    "weights": ("parameters",),
    "moments": ("optimizer_state",),
    "gradients": ("gradients",),
    "buffers": ("communication_buffers", "unsharded_layer"),
    "activations": ("activations", "input_batch"),
    "context, reserve": ("context", "reserve"),
    "tables": ("embedding_shards",),
}
"""Columns, and the plan's items that are summed there."""


class Deepest(NamedTuple):
    """The deepest network that fits."""

    layers: int
    parameters: int
    memory: MemoryEstimate


def network(layers: int, width: int) -> ModelConfig:
    """Layers of equal size, nearly all of whose parameters are those of one MLP."""
    layer = {"modules": [{"kind": "dlrm", "mlp": [width, width]}], "out_embeddings": 8, "ensemble": "concat"}
    return parse_model({"embedding_dim": 64, "layers": [layer] * layers, "dropout": 0.0}, "benchmark")


def deepest(held: str, cluster: Cluster, features: FeatureSchema, width: int, batch: int) -> Deepest | None:
    """The deepest network that fits, by bisection; None if a single layer does not."""
    training = TrainingConfig(epochs=1, batch_size=batch).resolved(10**6, "bf16")

    def memory(layers: int) -> MemoryEstimate | None:
        pricing = CostModel(network(layers, width), features, training, cluster)
        found = pricing.memory(named(held))
        return found if pricing.lacking_bytes(found) == 0 else None

    fits, too_deep = 0, 1
    while too_deep <= DEEPEST and memory(too_deep) is not None:
        fits, too_deep = too_deep, 2 * too_deep
    while too_deep - fits > 1:
        middle = (fits + too_deep) // 2
        fits, too_deep = (middle, too_deep) if memory(middle) is not None else (fits, middle)
    found = memory(fits) if fits else None
    if found is None:
        return None
    return Deepest(fits, dense_parameters(model_cost(network(fits, width), features)), found)


def row(held: str, found: Deepest | None, than: Deepest | None) -> list[str]:
    """The network in words: beside plain DP's, and its bytes per parameter."""
    if found is None:
        return [held, "none", *["–"] * (4 + len(ITEMS))]
    sizes = [sum(getattr(found.memory, name) for name in names) for names in ITEMS.values()]
    return [
        held,
        str(found.layers),
        f"{found.parameters / 1e9:.3f}",
        f"{found.parameters / than.parameters:.2f}" if than else "–",
        *(f"{size / found.parameters:.2f}" for size in sizes),
        f"{found.memory.host / found.parameters:.1f}",
        found.memory.peak_at,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hbm", type=parse_bytes, default=parse_bytes("31.74GiB"))
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--held", nargs="+", default=list(HELD))
    options = parser.parse_args()
    cluster = load_cluster(CLUSTER).with_ranks("1x1").with_hbm(options.hbm)
    features = FeatureSchema(
        tables=tuple(Table(name=f"t{index}", rows=ROWS) for index in range(TABLES)),
        numeric=tuple(f"n{index}" for index in range(NUMERIC)),
    )
    print(machine())
    print(f"{options.hbm / 2**30:.2f} GiB, width {options.width}, {options.batch} examples, bf16")
    rows, plain = [], deepest("dp", cluster, features, options.width, options.batch)
    for held in options.held:
        found = deepest(held, cluster, features, options.width, options.batch)
        rows.append(row(held, found, plain))
        print(" | ".join(rows[-1]), flush=True)
    columns = [f"{name}, bytes per parameter" for name in ITEMS]
    header = ["held by", "layers", "billion parameters", "times plain DP", *columns]
    print(f"\n{markdown([*header, 'host, bytes per parameter', 'peak at'], rows)}")


if __name__ == "__main__":
    main()
