"""The DHEN paper's Figure 6, predicted: throughput of DP, HSDP and FSDP against depth on 256 A100.

    python -m benchmarks.planner.paper_figure6
        ours beside the paper's, then what it depends on
    python -m benchmarks.planner.paper_figure6 --out fig6.html
        and the figure
    python -m benchmarks.planner.paper_figure6 --sensitivity bf16 UPDATE
        of what it depends on, the lines with these words

The paper gives neither widths nor batch, precision or tables. Ours are chosen once, so that 22 layers are the
most that DP holds: a global batch of 65,536 in fp32, 128 embeddings of 128 numbers (127 tables and the
numeric inputs), in each layer an MLP over pairwise dots (dlrm, 1024-1024) beside a linear module, summed, and
95 million rows per table, 20 ids per example. All else is the cluster's (trials/cluster/catalog/zionex.yaml, from
data sheets) or the planner's own (trials/planner/device_constants.py); no value is fitted to the curve, but the
choices were made with the order of the paper in view, and the table of what it depends on says how much hangs on
them. No GPU was at hand: all of it is unverified.
"""

from __future__ import annotations

import argparse
import importlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.figures.style import BLUE, GREY, VERMILION, drawing
from dhen.config import DhenConfig
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from dhen.values import parse
from trials.cluster.cluster import Cluster
from trials.cluster.load import load_cluster
from trials.cluster.machine import Precision
from trials.job import TrainingConfig
from trials.planner.estimates import PricedStrategy
from trials.planner.plan import plan
from trials.strategy import Dense

DEPTHS = (1, 8, 16, 24, 32)
"""Where the paper's figure was read off."""
PAPER: dict[Dense, dict[int, float]] = {
    "dp": {1: 1.35, 8: 1.34, 16: 1.37},
    "hsdp": {1: 1.16, 8: 1.14, 16: 1.18, 24: 1.34, 32: 1.21},
    "fsdp": dict.fromkeys(DEPTHS, 1.0),
}
"""Throughput relative to FSDP, read off Figure 6; where there is none, the paradigm ran out of memory."""
NAMES: dict[Dense, str] = {"dp": "DP", "hsdp": "HSDP", "fsdp": "FSDP"}
COLORS: dict[Dense, str] = {"dp": VERMILION, "hsdp": BLUE, "fsdp": GREY}
DEEPEST = 40
PLANNER = "trials.planner"
CONSTANTS = {
    "MATMUL_SHARE": ("step_time",),
    "MEMORY_SHARE": ("step_time", "tables.table_cost"),
    "OVERLAP_SLOWDOWN": ("step_time",),
    "KERNEL_SECONDS": ("step_time",),
    "COLLECTIVE_SECONDS": ("collectives", "step_time"),
    "BUCKET_LATENCY_SHARE": ("collectives",),
    "UPDATE_MASTERS": ("step_time",),
    "UPDATE_MOMENTS": ("step_time",),
}
"""The planner's, and who reads them."""
NUMBERS = (
    "peak_flops.fp32",
    "memory_bandwidth",
    "nvlink.bandwidth",
    "nvlink.latency",
    "network.bandwidth",
    "network.latency",
)
"""The cluster's."""


class Setting(NamedTuple):
    """What the paper does not say."""

    widths: tuple[int, ...] = (1024, 1024)
    batch_size: int = 65_536
    precision: Precision = "fp32"
    rows: int = 95_000_000
    """Of each table."""


class Point(NamedTuple):
    """One depth, without other techniques."""

    depth: int
    seconds: dict[Dense, float]
    """Of a step."""
    fits: dict[Dense, bool]

    def relative(self, dense: Dense) -> float:
        """Throughput over FSDP's, whether it fits or not."""
        return self.seconds["fsdp"] / self.seconds[dense]


def model(depth: int, setting: Setting) -> DhenConfig:
    modules = [{"kind": "linear"}, {"kind": "dlrm", "rank": 16, "mlp": setting.widths}]
    layer = {"modules": modules, "ensemble": "sum", "out_embeddings": 128}
    data = {"embedding_dim": 128, "numeric_mlp": (512,), "head": (1024,), "layers": [layer] * depth}
    config = parse_model(data, "figure 6")
    assert isinstance(config, DhenConfig)
    return config


def schema(setting: Setting) -> FeatureSchema:
    tables = [Table(name=f"t{i}", rows=setting.rows, multi_hot=True, mean_ids=20) for i in range(127)]
    return FeatureSchema(tables=tuple(tables), numeric=tuple(f"n{i}" for i in range(100)))


def point(depth: int, setting: Setting, cluster: Cluster) -> Point:
    training = TrainingConfig(batch_size=setting.batch_size, precision=setting.precision)
    planned = plan(model(depth, setting), schema(setting), training, cluster)
    plain: dict[Dense, PricedStrategy] = {
        each.strategy.dense: each
        for each in planned.strategies
        if len(each.strategy.techniques) == (each.strategy.dense != "dp")
    }
    return Point(
        depth,
        {dense: plain[dense].time.total for dense in NAMES},
        {dense: plain[dense].fits for dense in NAMES},
    )


def deepest(points: Sequence[Point], dense: Dense) -> int:
    return max((each.depth for each in points if each.fits[dense]), default=0)


def in_order(each: Point) -> bool:
    """DP before HSDP before FSDP, of those that fit."""
    there = [each.relative(dense) for dense in NAMES if each.fits[dense]]
    return all(a > b for a, b in pairwise(there))


def cell(each: Point, dense: Dense) -> str:
    return f"{each.relative(dense):.2f}" if each.fits[dense] else "fails"


def comparison(points: Sequence[Point]) -> str:
    rows = []
    for each in points:
        row: list[object] = [each.depth]
        for dense in ("dp", "hsdp"):
            theirs = PAPER[dense].get(each.depth)
            residual = f"{each.relative(dense) - theirs:+.2f}" if theirs and each.fits[dense] else ""
            row += [cell(each, dense), f"{theirs:.2f}" if theirs else "fails", residual]
        rows.append([*row, *(f"{1e3 * each.seconds[dense]:.1f}" for dense in NAMES)])
    head = ["layers", "DP", "paper", "residual", "HSDP", "paper", "residual", "DP ms", "HSDP ms", "FSDP ms"]
    return markdown(head, rows)


def sensitivity_row(name: str, setting: Setting, cluster: Cluster) -> list[object]:
    points = [point(depth, setting, cluster) for depth in DEPTHS]
    shown: list[object] = [cell(points[i], "dp") for i in range(3)]
    shown += [cell(each, "hsdp") for each in points]
    last = dp_ends(setting, cluster)
    ordered = all(map(in_order, [*points, point(last, setting, cluster)]))
    return [name, *shown, last, "yes" if ordered else "no"]


def dp_ends(setting: Setting, cluster: Cluster) -> int:
    """The most layers that DP holds, between 1 and 64."""
    return bisect_left(range(1, 65), True, key=lambda d: not point(d, setting, cluster).fits["dp"])


@contextmanager
def changed(constant: str, factor: float) -> Iterator[None]:
    """The planner with another value of one of its constants."""
    modules = [importlib.import_module(f"{PLANNER}.{name}") for name in CONSTANTS[constant]]
    before = getattr(modules[0], constant)
    try:
        for module in modules:
            setattr(module, constant, before * factor)
        yield
    finally:
        for module in modules:
            setattr(module, constant, before)


def with_number(cluster: Cluster, key: str, factor: float) -> Cluster:
    data: dict[str, Any] = cluster.to_dict()
    *path, last = key.split(".")
    place = data
    for part in path:
        place = place[part]
    place[last] *= factor
    return parse(Cluster, data, key)


class Change(NamedTuple):
    """One thing other than above: the paper's setting, the cluster, or a constant of the planner by a factor."""

    name: str
    setting: Setting = Setting()
    number: tuple[str, float] | None = None
    constant: tuple[str, float] | None = None

    def row(self, cluster: Cluster) -> list[object]:
        """Its line of the table."""
        if self.number is not None:
            cluster = with_number(cluster, *self.number)
        with changed(*self.constant) if self.constant is not None else nullcontext():
            return sensitivity_row(self.name, self.setting, cluster)


def changes() -> Iterator[Change]:
    """Each constant a fifth lower and higher, then other choices of what the paper does not say."""
    yield Change("as above")
    for key in NUMBERS:
        yield from (Change(f"{key} x {factor}", number=(key, factor)) for factor in (0.8, 1.2))
    for key in CONSTANTS:
        yield from (Change(f"{key} x {factor}", constant=(key, factor)) for factor in (0.8, 1.2))
    yield Change(
        "buckets of 25 MiB", constant=("BUCKET_LATENCY_SHARE", 5.0)
    )  # any share of latency is allowed
    yield Change("OVERLAP_SLOWDOWN 0", constant=("OVERLAP_SLOWDOWN", 0.0))
    yield Change("batch 32,768", Setting(batch_size=32_768))
    yield Change("batch 131,072", Setting(batch_size=131_072))
    yield Change("MLP 512-512", Setting(widths=(512, 512)))
    yield Change("MLP 2048-1024", Setting(widths=(2048, 1024)))
    yield Change("bf16", Setting(precision="bf16"))
    yield Change("bf16, batch 262,144", Setting(precision="bf16", batch_size=262_144))


def sensitivity(cluster: Cluster, words: Sequence[str]) -> str:
    """A line for each change whose name has one of the words; for all where there is no word."""
    wanted = [each for each in changes() if not words or any(word in each.name for word in words)]
    rows = [each.row(cluster) for each in wanted]
    head = ["changed", *(f"DP {d}" for d in DEPTHS[:3]), *(f"HSDP {d}" for d in DEPTHS)]
    return markdown([*head, "DP ends", "in order"], rows)


def figure(points: Sequence[Point]) -> go.Figure:
    traces: list[go.BaseTraceType] = []
    for dense, name in NAMES.items():
        fitting = [each for each in points if each.fits[dense]]
        traces.append(
            go.Scatter(
                x=[each.depth for each in fitting],
                y=[each.relative(dense) for each in fitting],
                name=name,
                mode="lines",
                line={"color": COLORS[dense], "width": 2},
            )
        )
        read_off = PAPER[dense]
        traces.append(
            go.Scatter(
                x=list(read_off),
                y=list(read_off.values()),
                name=f"{name}, paper",
                mode="markers",
                marker={"color": COLORS[dense], "size": 9, "symbol": "diamond-open"},
            )
        )
    found = drawing(
        traces,
        title="Throughput relative to FSDP against depth, 256 A100",
        subtitle="Lines: predicted, as far as memory goes. Diamonds: read off the paper's Figure 6.",
        height=460,
    )
    found.update_xaxes(title="layers")
    found.update_yaxes(title="throughput, FSDP = 1", rangemode="tozero")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="HTML file for the figure")
    parser.add_argument("--no-sensitivity", action="store_true")
    parser.add_argument(
        "--sensitivity", nargs="+", metavar="WORD", default=[], help="lines with these words alone"
    )
    parser.add_argument(
        "--deepest", type=int, default=DEEPEST, help="layers up to which depths are looked at"
    )
    options = parser.parse_args()
    cluster, setting = load_cluster("zionex").with_ranks("32x8"), Setting()
    points = [point(depth, setting, cluster) for depth in range(1, options.deepest + 1)]
    print(f"{machine()}\n\n{comparison([points[depth - 1] for depth in DEPTHS if depth <= len(points)])}\n")
    ends = deepest(points, "dp")
    wrong = [each.depth for each in points if not in_order(each)]
    print(f"DP ends at {ends} layers ({'as required' if ends == 22 else 'NOT the 22 required'}).")
    print(
        f"HSDP fits to {deepest(points, 'hsdp')}, FSDP to {deepest(points, 'fsdp')} of {len(points)} layers."
    )
    print(f"DP > HSDP > FSDP wherever each fits: {f'NOT at {wrong}' if wrong else 'holds at all depths'}.")
    if not options.no_sensitivity:
        print(f"\n{sensitivity(cluster, options.sensitivity)}")
    if options.out:
        figure(points).write_html(options.out, include_plotlyjs=True)
        print(f"\nfigure: {options.out}")


if __name__ == "__main__":
    main()
