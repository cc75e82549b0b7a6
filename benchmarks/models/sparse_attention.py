"""Sparse attention beside dense attention: time, memory and their growth, and what it costs in NE.

    python -m benchmarks.models.sparse_attention speed
        CPU milliseconds of attention's products and softmax, forward and backward, and the peak of their
        memory, by the number of embeddings: each layout, full dense attention, and dense attention
        under the first layout's mask, the latter two as the module `attention` has them and in
        PyTorch's own kernel; all in turns, medians
    python -m benchmarks.models.sparse_attention ne
        NE on validation of one layer over a generated log of 300 columns, beside the module `attention`, with a
        t-interval over pairs of one seed; labels follow from ids and from products of columns that stand side by
        side, or anywhere with `--shuffled`

Times are those of the process (`time.process_time`), so that other work beside it counts little.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.models.one_network import network_flops, parsed, stacked, validation_ne
from benchmarks.shared.generated_log import generated_log
from benchmarks.shared.machine_and_tables import machine, markdown, spread
from dhen.blocks.sparse_attention import SparseAttentionConfig
from dhen.ops.block_attention import BlockAttention
from dhen.ops.block_layout import BlockLayout
from search.analysis.statistics import t_interval
from trials.planner.memory_counter import MemoryCounter
from trials.records.job import TrainingConfig
from trials.runtime.launcher import Launcher
from trials.training.memory_limit import keep_freed_memory

LAYOUTS: dict[str, dict[str, Any]] = {
    "fixed": {"layout": "fixed"},
    "sliding_window": {"layout": "sliding_window"},
    "bigbird": {"layout": "bigbird"},
    "variable": {"layout": "variable", "local_blocks": [2, 4]},
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONFIDENCE = 0.95
MIB = 2**20
Attention = Callable[[Tensor], Tensor]


def dense(heads: int, mask: Tensor | None) -> Attention:
    """As the module `attention` has it on CPUs."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = _by_head(qkv, heads).flatten(1, 2)
        scores = torch.bmm(q, k.mT).float()
        weights = (scores if mask is None else scores + mask).softmax(dim=-1).to(qkv.dtype)
        return _joined(torch.bmm(weights, v).view(len(qkv), heads, qkv.shape[1], -1))

    return attend


def kernel(heads: int, mask: Tensor | None) -> Attention:
    """In PyTorch's own kernel."""

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = _by_head(qkv, heads)
        added = None if mask is None else mask.to(qkv.dtype)
        return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=1.0))

    return attend


def sparse(layout: BlockLayout) -> Attention:
    """As the module `sparse_attention` has it."""
    module = BlockAttention(layout)
    return lambda qkv: module(qkv, 0.0)


def _by_head(qkv: Tensor, heads: int) -> Tensor:
    return qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)


def _joined(values: Tensor) -> Tensor:
    return values.transpose(1, 2).flatten(2)


def _step(attend: Attention, qkv: Tensor) -> None:
    y = attend(qkv.detach().requires_grad_())
    torch.autograd.backward(y, torch.ones_like(y))


def milliseconds(attend: Attention, qkv: Tensor) -> float:
    start = time.process_time()
    _step(attend, qkv)
    return 1e3 * (time.process_time() - start)


def peak_mib(attend: Attention, qkv: Tensor) -> float:
    """Beside queries, keys and values themselves."""
    with MemoryCounter() as counter:
        counter.label([qkv], "given")
        before = counter.total
        counter.start_over("step")
        _step(attend, qkv)
        return (counter.peak - before) / MIB


def contestants(options: argparse.Namespace, embeddings: int) -> dict[str, tuple[Attention, float]]:
    """By name, each with its share of the pairs of embeddings; the mask is that of the first layout."""
    layouts = {
        name: SparseAttentionConfig(
            **LAYOUTS[name], heads=options.heads, block_size=options.block_size
        ).layout_over(embeddings)
        for name in options.layouts
    }
    allowed = layouts[options.layouts[0]].mask()[0]
    mask = torch.zeros(embeddings, embeddings).masked_fill(~allowed, -math.inf)
    found: dict[str, tuple[Attention, float]] = {
        "dense": (dense(options.heads, None), 1.0),
        "dense, kernel": (kernel(options.heads, None), 1.0),
        "masked": (dense(options.heads, mask), 1.0),
        "masked, kernel": (kernel(options.heads, mask), 1.0),
    }
    for name, layout in layouts.items():
        pairs = layout.pairs / options.heads * layout.size**2 / embeddings**2
        found[name] = (sparse(layout), pairs)
    return found


def speed(options: argparse.Namespace) -> None:
    """A row per precision, number of embeddings and contestant."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, peaks = [], dict[tuple[str, str], list[float]]()
    for precision in options.precisions:
        for embeddings in options.embeddings:
            torch.manual_seed(0)
            qkv = torch.randn(options.examples, embeddings, 3 * options.dim).to(PRECISIONS[precision])
            found = contestants(options, embeddings)
            times: dict[str, list[float]] = {name: [] for name in found}
            for turn in range(options.repeats + 1):
                for name, (attend, _) in found.items():
                    took = milliseconds(attend, qkv)
                    if turn:  # the first one warms up
                        times[name].append(took)
            for name, (attend, pairs) in found.items():
                median, peak = statistics.median(times[name]), peak_mib(attend, qkv)
                peaks.setdefault((precision, name), []).append(peak)
                rows.append([precision, embeddings, name, f"{pairs:.2f}", f"{median:.2f}", f"{peak:.2f}"])
                print(*rows[-1], file=sys.stderr, flush=True)
    print(machine(), "\n")
    print(markdown(["precision", "embeddings", "attention", "pairs", "CPU ms", "peak MiB"], rows), "\n")
    if len(options.embeddings) < 2:
        return
    grown = math.log2(options.embeddings[-1] / options.embeddings[-2])
    growth = [[*key, f"{math.log2(mib[-1] / mib[-2]) / grown:.2f}"] for key, mib in peaks.items()]
    print(markdown(["precision", "attention", "memory grows with the power"], growth))


def networks(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One layer each; the module `attention` first."""
    shared = {"heads": options.heads}
    modules = {"attention": {"kind": "attention"}} | {
        name: {"kind": "sparse_attention", "block_size": options.block_size} | LAYOUTS[name]
        for name in options.layouts
    }
    return {name: stacked(module | shared, layers=1) for name, module in modules.items()}


def ne(options: argparse.Namespace) -> None:
    """A row per network."""
    if options.seeds < 2:
        raise SystemExit("--seeds: an interval needs two at least")
    order = list(range(options.columns))
    if options.shuffled:
        random.Random(0).shuffle(order)
    training, launcher, rows = TrainingConfig(epochs=options.passes), Launcher(), []
    with tempfile.TemporaryDirectory() as folder:
        columns = [options.ids] * options.columns
        log = generated_log(Path(folder) / "log", options.rows, columns, buckets=True, order=order)
        nes: dict[str, list[float]] = {name: [] for name in networks(options)}
        for seed in range(options.seeds):
            for name, data in networks(options).items():
                nes[name].append(validation_ne(log, launcher, parsed(data), training, seed))
                print(seed, name, nes[name][-1], file=sys.stderr, flush=True)
        for name, data in networks(options).items():
            pairs = zip(nes[name], nes["attention"], strict=True)
            percent = t_interval([100 * (one / other - 1) for one, other in pairs], CONFIDENCE)
            difference = "" if name == "attention" else f"{percent.mean:+.2f} ± {percent.half_width:.2f} %"
            flops = network_flops(parsed(data), log)
            rows.append([name, spread(nes[name]), difference, f"{flops:,.0f}"])
    print(machine(), "\n")
    print(markdown(["module", "validation NE", "to attention", "FLOPs"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    of_speed, of_ne = kinds.add_parser("speed"), kinds.add_parser("ne")
    of_speed.set_defaults(run=speed)
    of_speed.add_argument("--embeddings", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    of_speed.add_argument("--examples", type=int, default=16)
    of_speed.add_argument("--dim", type=int, default=32)
    of_speed.add_argument("--repeats", type=int, default=7)
    of_speed.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    of_ne.set_defaults(run=ne)
    of_ne.add_argument("--columns", type=int, default=300)
    of_ne.add_argument("--ids", type=int, default=3, help="distinct ids of each column")
    of_ne.add_argument("--rows", type=int, default=12_000)
    of_ne.add_argument("--passes", type=int, default=4)
    of_ne.add_argument("--seeds", type=int, default=5)
    of_ne.add_argument("--shuffled", action="store_true", help="columns in an order of chance")
    for each, layouts in (
        (of_speed, ["bigbird", "sliding_window", "fixed", "variable"]),
        (of_ne, ["bigbird", "sliding_window", "fixed"]),
    ):
        each.add_argument("--heads", type=int, default=2)
        each.add_argument("--block-size", type=int, default=8)
        each.add_argument("--layouts", nargs="+", default=layouts, choices=LAYOUTS)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
