"""Which synchrony of parameter servers is faster for light and heavy dense parts, at 1 to 1,000 workers, by the
planner: a prediction. Nothing is trained, and no accelerator is needed.

    python -m benchmarks.planner.servers
    python -m benchmarks.planner.servers --rows 2000000000 --dimension 128 --batch 2048
"""

from __future__ import annotations

import argparse

from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.config import ModelConfig
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.choice import MODES, seconds_per_batch
from trials.planner.plan import plan
from trials.planner.pricing import CostModel
from trials.records.job import Synchrony, TablesConfig, TrainingConfig
from trials.records.strategy import Strategy

CLUSTER, PER_HOST = "zionex", 8
WORKERS = (1, 8, 64, 256, 1000)
TABLES = 8
DENSE = {"light": (1, 128), "heavy": (8, 4096)}
"""Layers, and the width of each one's MLP."""


def network(layers: int, width: int, dimension: int) -> ModelConfig:
    """Layers of equal size."""
    layer = {"modules": [{"kind": "dlrm", "mlp": [width, width]}], "out_embeddings": 8, "ensemble": "concat"}
    return parse_model({"embedding_dim": dimension, "layers": [layer] * layers, "dropout": 0.0}, "benchmark")


def workers_on(count: int) -> Cluster:
    """The cluster with so many workers, eight per host."""
    per_host = min(count, PER_HOST)
    return load_cluster(CLUSTER).with_ranks(f"{count // per_host}x{per_host}")


def row(
    name: str, model: ModelConfig, schema: FeatureSchema, workers: int, batch: int, servers: int | None
) -> tuple[str, ...]:
    """One line of the table; each worker has `batch` examples of a step, under async too."""
    cluster, seconds, chosen = workers_on(workers), dict[Synchrony, float](), dict[Synchrony, Strategy]()
    for mode in MODES:
        of_step = batch if mode == "async" else batch * workers
        training = TrainingConfig(
            batch_size=of_step, precision="bf16", tables=TablesConfig(synchrony=mode)
        ).resolved(10**9, "bf16")
        found = plan(model, schema, training, cluster).chosen
        if found is None:
            continue
        chosen[mode] = found if servers is None else found.replace(servers=servers)
        pricing = CostModel(model, schema, training, cluster)
        seconds[mode] = seconds_per_batch(pricing, chosen[mode], mode) / of_step
    best = min(seconds, key=lambda mode: seconds[mode], default=None)
    return (
        name,
        f"{workers:,}",
        ", ".join(dict.fromkeys(strategy.name for strategy in chosen.values())) or "none fits",
        *(f"{1 / seconds[mode]:,.0f}" if mode in seconds else "-" for mode in MODES),
        best or "-",
    )


def main() -> None:
    """Prints a table of predicted examples per second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000, help="rows of each of eight tables")
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024, help="examples of a worker in a step")
    parser.add_argument("--servers", type=int, default=None, help="number of servers; as planned by default")
    given = parser.parse_args()
    schema = FeatureSchema(
        tables=tuple(Table(name=f"t{number}", rows=given.rows) for number in range(TABLES)),
        numeric=("a", "b"),
    )
    print(f"{machine()}; {CLUSTER}, {vars(given)}; predictions")
    print()
    lines = [
        row(
            name,
            network(layers, width, given.dimension),
            schema,
            workers,
            given.batch,
            given.servers,
        )
        for name, (layers, width) in DENSE.items()
        for workers in WORKERS
    ]
    print(
        markdown(
            ("dense part", "workers", "held as", *(f"{mode}, examples/s" for mode in MODES), "fastest"), lines
        )
    )


if __name__ == "__main__":
    main()
