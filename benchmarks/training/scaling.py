"""Cost against work, ours alone: seconds a step along one axis, and its slope on log-log scales.

    python -m benchmarks.training.scaling --axis rows
        seconds a pass over 0.1 to 10 million generated rows
    python -m benchmarks.training.scaling --axis layers
        1 to 32 layers
    python -m benchmarks.training.scaling --axis tables
        10 to 1,000 embedding tables
    python -m benchmarks.training.scaling --axis table-rows
        a table of 1,000 to 10 million rows
    python -m benchmarks.training.scaling --axis widths
        MLPs 64 to 1,024 wide, as a share of the matmul peak

`--points` chooses others. A slope of 1 is a cost in proportion, 0 a cost that does not grow; it is the least
squares line through the logarithms. Each point trains in a process of its own, as a candidate does. The speed
leaves out evaluations and the first steps; only on the rows axis seconds are those of the whole pass.

The model is a DHEN of four layers, in each an MLP 256-128 over the pairwise dots of 16 learned mixes (dlrm)
beside two cross layers over the embeddings (dcn_v2), eight embeddings out, concatenated. On the tables axis
an MLP takes the place of the cross layers, whose cost in the first layer grows with the tables' square. On
the widths axis the MLP has two hidden layers of the width, and the baseline is AdvancedDLRM with the same.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared.generated_log import TEN_COLUMNS, generated_log
from benchmarks.shared.machine_and_tables import TRAINING_FLOPS, machine, markdown
from benchmarks.training.peers.contest import Lap, steady_speed
from benchmarks.training.timed_steps import StepTrainer, completed, train_timed
from dhen.config import ModelConfig
from dhen.model import parse_model
from trials.cluster.machine import PRODUCT_SIZE, matmul_peak, measured_matmul, preferred_precision
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.records.trial_record import TrialRecord
from trials.runtime.launcher import Launcher

POINTS: dict[str, tuple[int, ...]] = {
    "rows": (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000),
    "layers": (1, 2, 4, 8, 16, 32),
    "tables": (10, 30, 100, 300, 1_000),
    "table-rows": (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
    "widths": (64, 128, 256, 512, 1_024),
}
HELD_OUT = 0.05
"""Of the rows, for validation, and as many for test."""
CROSS, MLP = {"kind": "dcn_v2", "layers": 2}, {"kind": "mlp", "mlp": [128, 64]}


def dhen(layers: int, mlp: Sequence[int] = (256, 128), beside: dict[str, Any] = CROSS) -> ModelConfig:
    """The model of all axes."""
    layer = {
        "modules": [{"kind": "dlrm", "rank": 16, "mlp": list(mlp)}, beside],
        "ensemble": "concat",
        "out_embeddings": 8,
    }
    return parse_model({"embedding_dim": 16, "layers": [layer] * layers}, "benchmark")


def baseline(width: int) -> ModelConfig:
    """AdvancedDLRM."""
    return parse_model({"family": "advanced_dlrm", "embedding_dim": 16, "mlp": [width, width]}, "benchmark")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One training, well ended or not."""

    at: float
    """Where on the axis."""
    record: TrialRecord
    laps: list[Lap]
    """Steps of the pass."""

    @property
    def step_seconds(self) -> float:
        """Of a step after the warm-up."""
        return self.laps[0][0] / steady_speed([self.laps])

    @property
    def row(self) -> list[str]:
        """A line of the table, without the point itself."""
        if not completed(self.record):
            return [f"{self.record.result.outcome.value}: {self.record.result.error}", "", "", ""]
        speed, peak = steady_speed([self.laps]), self.record.result.measured.peak_memory_bytes or 0
        flops = f"{self.record.job.flops or 0:,.0f}"
        return [f"{1000 * self.step_seconds:.1f}", f"{speed:,.0f}", f"{peak / 2**20:,.0f}", flops]


class Bench:
    """Trains one pass of models on logs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.launcher = Launcher()
        self.launcher.warm_up()

    def measure(self, at: float, model: ModelConfig, log: PreparedLog) -> Measured:
        """One pass, one evaluation."""
        batch = self.options.batch
        steps = max(1, log.split("train").rows // batch)
        training = TrainingConfig(batch_size=batch, epochs=1, evaluate_every=steps * batch)
        with tempfile.TemporaryDirectory() as folder:
            trainer = StepTrainer(self.launcher, log, Path(folder), threads=self.options.threads)
            record, stretches = train_timed(trainer, trainer.job(model, training, 0))
        laps = stretches[0] if stretches else []
        done = Measured(at=at, record=record, laps=laps)
        print(f"... {at:,.0f}: {', '.join(done.row[:2])}", flush=True)
        return done

    def log(self, folder: Path, columns: Sequence[int] = TEN_COLUMNS, **how: Any) -> PreparedLog:
        """Rows for the steps of one point, warm-up included."""
        rows = int((self.options.steps + 10) * self.options.batch / (1 - 2 * HELD_OUT)) + 1
        return generated_log(folder, rows, columns, held_out=HELD_OUT, **how)


def rows_axis(bench: Bench, folder: Path, points: Sequence[int]) -> Iterator[Measured]:
    for rows in points:
        log = generated_log(folder / str(rows), rows, held_out=HELD_OUT)
        yield bench.measure(log.split("train").rows, dhen(4), log)


def layers_axis(bench: Bench, folder: Path, points: Sequence[int]) -> Iterator[Measured]:
    log = bench.log(folder / "log")
    for layers in points:
        yield bench.measure(layers, dhen(layers), log)


def tables_axis(bench: Bench, folder: Path, points: Sequence[int]) -> Iterator[Measured]:
    for tables in points:
        log = bench.log(folder / str(tables), [1_000] * tables)
        yield bench.measure(tables, dhen(4, beside=MLP), log)


def table_rows_axis(bench: Bench, folder: Path, points: Sequence[int]) -> Iterator[Measured]:
    """Nine tables of 1,000 rows and one that grows; all its rows are equally likely, the worst for caches."""
    for rows in points:
        log = bench.log(folder / str(rows), [rows] + [1_000] * 9, buckets=True, uniform=True)
        yield bench.measure(rows, dhen(4), log)


def step_table(measured: Sequence[Measured], axis: str) -> None:
    """Seconds a step at each point, and the slope."""
    header = [axis, "ms a step", "examples/s", "peak RSS MiB", "FLOPs an example"]
    print(markdown(header, [[f"{each.at:,.0f}", *each.row] for each in measured]))
    whole = [each for each in measured if completed(each.record)]
    print(f"slope of seconds a step: {slope([(each.at, each.step_seconds) for each in whole])}")


def pass_table(measured: Sequence[Measured], axis: str) -> None:
    """Seconds a pass at each point, and the slope."""
    rows = []
    for each in measured:
        seconds = (
            f"{each.record.result.measured.train_seconds:.1f}",
            f"{each.record.result.measured.evaluate_seconds:.1f}",
        )
        rows.append([f"{each.at:,.0f}", *(seconds if completed(each.record) else ("", "")), *each.row[1:3]])
    header = ["training rows", "seconds a pass", "evaluation", "examples/s", "peak RSS MiB"]
    print(markdown(header, rows))
    whole = [each for each in measured if completed(each.record)]
    taken = [(each.at, each.record.result.measured.train_seconds or 0.0) for each in whole]
    print(f"slope of seconds a pass: {slope(taken)}")


def widths(bench: Bench, folder: Path, points: Sequence[int]) -> None:
    """Prints the share of the matmul peak for each model and width."""
    log, peak, precision = bench.log(folder / "log"), matmul_peak(PRODUCT_SIZE), preferred_precision()
    models: dict[str, Callable[[int], ModelConfig]] = {
        "AdvancedDLRM (baseline)": baseline,
        "4-layer DHEN": lambda width: dhen(4, (width, width)),
        "8-layer DHEN": lambda width: dhen(8, (width, width)),
    }
    found: list[tuple[str, Measured]] = []
    for name, model in models.items():
        for width in points:
            found.append((name, bench.measure(width, model(width), log)))
            peak = peak.or_better(measured_matmul(PRODUCT_SIZE))
    rows, at = [], peak.bf16 if precision == "bf16" else peak.fp32
    for name, each in found:
        share = ""
        if completed(each.record):
            flops = TRAINING_FLOPS * (each.record.job.flops or 0.0)
            share = f"{flops * steady_speed([each.laps]) / at:.1%}"
        rows.append([name, f"{each.at:,.0f}", *each.row, share])
    print(f"matmul peak {peak.fp32 / 1e9:,.0f} GFLOP/s fp32, {peak.bf16 / 1e9:,.0f} bf16")
    header = ["model", "width", "ms a step", "examples/s", "peak RSS MiB", "FLOPs an example"]
    print(markdown([*header, f"share of the {precision} peak"], rows))


def slope(points: Sequence[tuple[float, float]]) -> str:
    """Of the logarithms, by least squares; the last step's too, which tells what larger sizes will cost."""
    if len(points) < 2:
        return "needs two points"
    x, y = np.log(np.array(points).T)
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return f"{np.polyfit(x, y, 1)[0]:.2f} over all points, {last:.2f} between the last two"


AXES: dict[str, Callable[[Bench, Path, Sequence[int]], Iterator[Measured]]] = {
    "rows": rows_axis,
    "layers": layers_axis,
    "tables": tables_axis,
    "table-rows": table_rows_axis,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", choices=POINTS, required=True)
    parser.add_argument("--points", type=int, nargs="+", help="in place of the usual ones")
    parser.add_argument("--steps", type=int, default=60, help="timed steps a point (all axes but rows)")
    parser.add_argument("--batch", type=int, help="4,096; on the tables axis 1,024")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # the peak is that of as many threads
    options.batch = options.batch or (1_024 if options.axis == "tables" else 4_096)
    points = options.points or POINTS[options.axis]
    print(f"{machine()}\nbatch {options.batch:,}, {preferred_precision()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options)
        if options.axis == "widths":
            widths(bench, Path(folder), points)
            return
        measured = list(AXES[options.axis](bench, Path(folder), points))
    (pass_table if options.axis == "rows" else step_table)(measured, options.axis)


if __name__ == "__main__":
    main()
