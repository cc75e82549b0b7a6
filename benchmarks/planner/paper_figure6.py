"""The DHEN paper's Figure 6, predicted: throughput of DP, HSDP and FSDP against depth on 256 A100.

    python -m benchmarks.planner.paper_figure6
        ours beside the paper's, then what it depends on
    python -m benchmarks.planner.paper_figure6 --out fig6.html
        and the figure
    python -m benchmarks.planner.paper_figure6 --sensitivity bf16 UPDATE
        of what it depends on, the lines with these words

The paper names the precision: automatic mixed precision, fp16 tables, a bf16 optimizer, bf16 all-reduce and
all-to-all. It gives neither widths nor batch or tables. Ours are chosen once, so that 22 layers are the most that
DP holds: a global batch of 65,536, 128 embeddings of 128 numbers (127 tables and the numeric inputs), in each
layer an MLP over pairwise dots (dlrm, 1024-1024) beside a linear module, summed, and 208 million rows per table,
20 ids per example. All else is the cluster's (trials/cluster/catalog/zionex.yaml, from data sheets) or the
planner's own (trials/planner/collectives.py); no value is fitted to the curve. Steps are those of this
project's engines as the planner prices them, and beside them those of PyTorch as it was then
(benchmarks/planner/stock_pytorch.py). No A100 was at hand: all of it is unverified.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from benchmarks.planner import stock_pytorch
from benchmarks.planner.stock_pytorch import BF16, Stock, step_seconds
from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.figures.style import BLUE, GREY, VERMILION, drawing
from dhen.config import DhenConfig
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from dhen.values import parse
from trials.cluster.cluster import Cluster
from trials.cluster.machine import Precision
from trials.cluster.this_machine import load_cluster
from trials.planner.pricing import CostModel
from trials.planner.step_time import prepare
from trials.records.job import TrainingConfig
from trials.records.strategy import Dense, Strategy

DEPTHS = (1, 8, 16, 24, 32)
"""Where the paper's figure was read off."""
PAPER: dict[Dense, dict[int, float]] = {
    "dp": {1: 1.35, 8: 1.34, 16: 1.37},
    "hsdp": {1: 1.16, 8: 1.14, 16: 1.18, 24: 1.34, 32: 1.21},
    "fsdp": dict.fromkeys(DEPTHS, 1.0),
}
"""Throughput relative to FSDP, read off Figure 6; if there is none, the paradigm ran out of memory."""
SPEED_UP = 1.08
"""How much faster the paper's DP was at 8 layers with fp16 tables, mixed precision and bf16 collectives."""
TF32 = 8.0
"""Peak FLOP/s of an A100 in TF32 over those in fp32 (156 and 19.5 TFLOP/s by NVIDIA's data sheet). Before its
version 1.12 PyTorch multiplied fp32 matrices in TF32 by default (its release notes)."""
NAMES: dict[Dense, str] = {"dp": "DP", "hsdp": "HSDP", "fsdp": "FSDP"}
COLORS: dict[Dense, str] = {"dp": VERMILION, "hsdp": BLUE, "fsdp": GREY}
DEEPEST = 40
RANKS = "32x8"
"""Two pods."""
PLANNER = "trials.planner."
CONSTANTS = (
    "MATMUL_SHARE",
    "MEMORY_SHARE",
    "OVERLAP_SLOWDOWN",
    "KERNEL_SECONDS",
    "LAUNCH_SECONDS",
    "HOST_STEP_SECONDS",
    "COLLECTIVE_SECONDS",
    "BUCKET_LATENCY_SHARE",
    "UPDATE_MASTERS",
    "UPDATE_MOMENTS",
    "UPDATE_KERNELS",
    "LL128_SECONDS",
    "TREE_SHARE",
)
"""The planner's."""
NUMBERS = (
    "peak_flops.bf16",
    "memory_bandwidth",
    "nvlink.bandwidth",
    "nvlink.latency",
    "network.bandwidth",
    "network.latency",
)
"""The cluster's."""


class Setting(NamedTuple):
    """What the paper does not say, its precision, and whose engines take the step."""

    widths: tuple[int, ...] = (1024, 1024)
    batch_size: int = 65_536
    precision: Precision = "bf16"
    """bf16 is the paper's mixed precision, with all its numbers of half the bytes; fp32 is without any."""
    rows: int = 206_000_000
    """Of each table."""
    stock: Stock | None = None
    """PyTorch as it was then; None for this project's engines."""

    @property
    def training(self) -> TrainingConfig:
        """The settings of a training in this precision."""
        if self.precision == "fp32":
            return TrainingConfig(batch_size=self.batch_size, precision="fp32")
        return TrainingConfig(
            batch_size=self.batch_size,
            precision="bf16",
            optimizer_precision="bf16",
            table_precision="fp16",
            all_to_all_precision="bf16",
            all_reduce_precision="bf16",
        )


IN_FP32 = Setting(precision="fp32", rows=95_000_000)
"""Numbers of twice the bytes, and rows so that 22 layers are the most that DP holds."""


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
    pricing = CostModel(model(depth, setting), schema(setting), setting.training, cluster)
    plain = {dense: Strategy(dense=dense) for dense in NAMES}
    return Point(
        depth,
        {dense: seconds(pricing, plain[dense], setting.stock) for dense in NAMES},
        {dense: pricing.lacking_bytes(pricing.memory(plain[dense])) == 0 for dense in NAMES},
    )


def seconds(pricing: CostModel, strategy: Strategy, stock: Stock | None) -> float:
    """Returns the seconds of a step, by the planner or as PyTorch took it then."""
    if stock is None:
        return pricing.time(strategy).total
    examples = pricing.micro_batch(strategy)
    segments, training = pricing.segments(examples), pricing.training
    step = prepare(segments, pricing.cluster, pricing.placement, examples=examples, training=training)
    return step_seconds(step, strategy.dense, stock)


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
    """The planner, and PyTorch as it was then, with another value of one of the planner's constants."""
    modules = [module for name, module in sys.modules.items() if name.startswith(PLANNER)]
    modules = [module for module in modules if hasattr(module, constant)]
    modules += [stock_pytorch] * hasattr(stock_pytorch, constant)
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
    yield from a_fifth_each_way("", Setting())
    # any share of latency is allowed
    yield Change("buckets of 25 MiB", constant=("BUCKET_LATENCY_SHARE", 5.0))
    yield Change("OVERLAP_SLOWDOWN 0", constant=("OVERLAP_SLOWDOWN", 0.0))
    yield Change("LL128 left out", constant=("LL128_SECONDS", 1e9))
    for batch in (32_768, 131_072, 262_144, 524_288):
        yield Change(f"batch {batch:,}", Setting(batch_size=batch))
    yield Change("MLP 512-512", Setting(widths=(512, 512)))
    yield Change("MLP 2048-1024", Setting(widths=(2048, 1024)))
    yield Change("fp32", IN_FP32)
    yield Change("fp32, LL128 left out", IN_FP32, constant=("LL128_SECONDS", 1e9))
    yield Change("fp32 in TF32", IN_FP32, number=("peak_flops.fp32", TF32))
    autocast = Stock(prefetch=True, bucket_bytes=None)
    yield Change("autocast", Setting(stock=autocast))
    yield Change("autocast, no prefetch", Setting(stock=autocast._replace(prefetch=False)))
    yield Change("PyTorch 1.11", Setting(stock=Stock()))
    yield Change("PyTorch 1.11, bf16 shards", Setting(stock=Stock(sharded=BF16)))
    for batch in (131_072, 262_144, 524_288):
        yield Change(f"PyTorch 1.11, batch {batch:,}", Setting(batch_size=batch, stock=Stock()))
    yield from a_fifth_each_way("PyTorch 1.11, ", Setting(stock=Stock()))


def a_fifth_each_way(prefix: str, setting: Setting) -> Iterator[Change]:
    for key in NUMBERS:
        yield from (Change(f"{prefix}{key} x {by}", setting, number=(key, by)) for by in (0.8, 1.2))
    for key in CONSTANTS:
        yield from (Change(f"{prefix}{key} x {by}", setting, constant=(key, by)) for by in (0.8, 1.2))


def sensitivity(cluster: Cluster, words: Sequence[str]) -> str:
    """A line for each change whose name has one of the words; for all if there is no word."""
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


def report(points: Sequence[Point]) -> str:
    """The table beside the paper's, where each fits, and whether the order is the paper's.

    Args:
        points: one for each depth from 1 on.
    """
    ends, wrong = deepest(points, "dp"), [each.depth for each in points if not in_order(each)]
    return (
        f"{comparison([points[depth - 1] for depth in DEPTHS if depth <= len(points)])}\n\n"
        f"DP ends at {ends} layers ({'as required' if ends == 22 else 'NOT the 22 required'}).\n"
        f"HSDP fits to {deepest(points, 'hsdp')}, FSDP to {deepest(points, 'fsdp')} of {len(points)} layers.\n"
        f"DP > HSDP > FSDP wherever each fits: {f'NOT at {wrong}' if wrong else 'holds at all depths'}."
    )


def speed_up(cluster: Cluster) -> str:
    """How much faster mixed precision makes DP at 8 layers, beside what the paper says of it."""
    in_tf32 = with_number(cluster, "peak_flops.fp32", TF32)
    before = {
        name: point(8, IN_FP32, on).seconds["dp"] for name, on in (("fp32", cluster), ("TF32", in_tf32))
    }
    after = {
        "this project's": point(8, Setting(), cluster).seconds["dp"],
        "PyTorch 1.11": point(8, Setting(stock=Stock()), cluster).seconds["dp"],
    }
    ratios = [f"{before[a] / after[b]:.2f} over {a} ({b})" for b in after for a in before]
    return f"DP at 8 layers in mixed precision: {', '.join(ratios)}; the paper's {SPEED_UP}."


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
    cluster = load_cluster("zionex").with_ranks(RANKS)
    depths = range(1, options.deepest + 1)
    points = [point(depth, Setting(), cluster) for depth in depths]
    stock = [point(depth, Setting(stock=Stock()), cluster) for depth in depths]
    print(f"{machine()}\n\nThis project's engines:\n\n{report(points)}\n\nPyTorch 1.11:\n\n{report(stock)}")
    print(f"\n{speed_up(cluster)}")
    if not options.no_sensitivity:
        print(f"\n{sensitivity(cluster, options.sensitivity)}")
    if options.out:
        figure(points).write_html(options.out, include_plotlyjs=True)
        print(f"\nfigure: {options.out}")


if __name__ == "__main__":
    main()
