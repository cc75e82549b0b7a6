"""Which technique is the least that fits, and which the fastest, at each depth and width?

    python -m benchmarks.planner.depth_and_width
        ZionEX and an H100 cluster, 128 ranks each
    python -m benchmarks.planner.depth_and_width --cluster zionex --ranks 32x8 --depths 1 8 --widths 1024

A layer is an MLP of two hidden layers as wide as the number says, beside a linear module, over 32 embeddings of
128 numbers; 26 tables of a million rows, bf16, a batch of 65,536. All is predicted: no step was run, and clusters
are as their data sheets have them.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.names import si
from dhen.config import ModelConfig
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import PlanOptions, PricedStrategy
from trials.planner.plan import Plan, plan
from trials.planner.pricing import CostModel
from trials.records.job import TrainingConfig
from trials.records.strategy import Prefer

DEPTHS, WIDTHS = (1, 4, 16, 64), (1024, 4096, 16_384, 65_536)
CLUSTERS, RANKS = ("zionex", "h100"), "16x8"
TRAINING = TrainingConfig(batch_size=65_536, precision="bf16")
SCHEMA = FeatureSchema(
    tables=tuple(Table(name=f"t{number}", rows=1_000_000) for number in range(26)), numeric=("age",)
)
NOTHING = "nothing fits"


class Cell(NamedTuple):
    """One depth and width on a cluster."""

    depth: int
    width: int
    parameters: int
    """Of the dense part."""
    least: PricedStrategy | None
    fastest: PricedStrategy | None
    cut: PricedStrategy | None
    """The fastest that fits of those that split modules or have pipelines."""


def model(depth: int, width: int) -> ModelConfig:
    layer = {"modules": [{"kind": "mlp", "mlp": [width, width]}, "linear"], "out_embeddings": 32}
    return parse_model({"embedding_dim": 128, "layers": [layer] * depth}, "depth and width")


def cell(depth: int, width: int, cluster: Cluster) -> Cell:
    of_size = model(depth, width)

    def planned(prefer: Prefer) -> Plan:
        return plan(of_size, SCHEMA, TRAINING, cluster, options=PlanOptions(prefer=prefer))

    least = planned("least")
    cut = [one for one in least.strategies if one.fits and one.strategy.model_parallel]
    return Cell(
        depth,
        width,
        CostModel(of_size, SCHEMA, TRAINING, cluster).numbers,
        least.best,
        planned("fastest").best,
        min(cut, key=lambda one: one.time.total, default=None),
    )


def shown(priced: PricedStrategy | None) -> list[str]:
    """The name and milliseconds of a step."""
    if priced is None:
        return [NOTHING, ""]
    return [priced.strategy.name, f"{1e3 * priced.time.total:.3g}"]


def table(cluster: Cluster, depths: list[int], widths: list[int]) -> str:
    cells = [cell(depth, width, cluster) for width in widths for depth in depths]
    rows = [
        [one.width, one.depth, si(one.parameters), *shown(one.least), *shown(one.fastest), *shown(one.cut)]
        for one in cells
    ]
    head = [
        "width",
        "layers",
        "parameters",
        "least",
        "ms",
        "fastest",
        "ms",
        "fastest that cuts the model",
        "ms",
    ]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", nargs="+", default=list(CLUSTERS), help="names or files (zionex h100)")
    parser.add_argument("--ranks", default=RANKS, help="hosts x ranks per host (16x8)")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    options = parser.parse_args()
    print(f"{machine()}\n")
    for name in options.cluster:
        cluster = load_cluster(name).with_ranks(options.ranks)
        print(f"{name}, {options.ranks}\n")
        print(f"{table(cluster, options.depths, options.widths)}\n")


if __name__ == "__main__":
    main()
