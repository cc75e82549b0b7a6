"""Growing tables beside tables of fixed rows: the time of a step, and NE where the capacity is short.

    python -m benchmarks.training.growing_tables steps
        milliseconds of a training step, in turns with the same network over tables of fixed rows
    python -m benchmarks.training.growing_tables ids
        a long stream of distinct ids through one table: million ids per second, memory of the process
    python -m benchmarks.training.growing_tables ne LOG.csv --columns user item
        NE on validation by capacity, as a share of the values that training rows have, and by what gives way;
        beside it all values in a vocabulary, and values hashed into as many fixed rows

The network of `steps` is a DHEN of two layers of dlrm beside linear. Its ten columns have ids drawn by Zipf's law
with exponent 1.1 from as many values as tables have rows.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.models.one_network import network_flops, parsed, stacked, validation_ne
from benchmarks.shared.machine_and_tables import beside, machine, markdown, spread
from dhen.batch import FeatureBatch, Keys
from dhen.inputs.growing import GrowingRows
from dhen.model import build_model
from dhen.schema import FeatureSchema, Growing, Table
from trials.data.loader import LabelledBatch
from trials.data.log_schema import LogSchema
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import GivenGrowing, ReadOptions
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks
from trials.runtime.launcher import Launcher
from trials.training.embeddings.growing import GrowingTables
from trials.training.step import TrainStep

COLUMNS, NUMBERS = 10, 4
SHARES = (1.0, 0.5, 0.2, 0.1)
STREAMED_AT_ONCE = 40_960
"""Ids of a step of 4,096 examples with ten columns."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line names and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, dest="part")
    steps = parts.add_parser("steps")
    steps.add_argument("--batches", type=int, nargs="+", default=[256, 4096])
    steps.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    steps.add_argument("--repeats", type=int, default=100)
    ids = parts.add_parser("ids")
    ids.add_argument("--distinct", type=int, default=10_000_000)
    ids.add_argument("--capacity", type=int, default=1_000_000)
    ne = parts.add_parser("ne")
    ne.add_argument("log", type=Path)
    ne.add_argument("--columns", nargs="+", required=True)
    ne.add_argument("--shares", type=float, nargs="+", default=SHARES)
    ne.add_argument("--seeds", type=int, default=3)
    ne.add_argument("--passes", type=int, default=1)
    ne.add_argument("--table-decay", type=float, default=0.0)
    ne.add_argument(
        "--in-order", action="store_true", help="rows in the order of the log, scored at the end alone"
    )
    options = parser.parse_args(arguments)
    print(f"{machine()}, one thread\n")
    torch.set_num_threads(1)
    if options.part == "steps":
        print(step_table(options.batches, options.rows, options.repeats))
    elif options.part == "ids":
        print(stream_table(options.distinct, options.capacity))
    else:
        training = TrainingConfig(epochs=options.passes, table_decay=options.table_decay)
        if options.in_order:
            training = training.replace(order="log", evaluate_every=sys.maxsize)
        print(ne_table(options.log, options.columns, options.shares, options.seeds, training))


def step_table(batches: Sequence[int], table_rows: Sequence[int], repeats: int) -> str:
    """Medians of steps of both kinds of tables, which take turns."""
    header = ["batch", "rows of each table", "fixed rows, ms", "growing, ms", "ratio"]
    lines = []
    for rows in table_rows:
        for size in batches:
            fixed, growing = _median_steps(size, rows, repeats)
            ratio = f"{growing / fixed:.2f}"
            lines.append([f"{size:,}", f"{rows:,}", f"{1e3 * fixed:.2f}", f"{1e3 * growing:.2f}", ratio])
    return markdown(header, lines)


def _median_steps(size: int, rows: int, repeats: int) -> tuple[float, float]:
    kinds = {False: _step(size, rows, None), True: _step(size, rows + 1, Growing(capacity=rows))}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    warm_up = max(20, 8 * rows // size if rows <= 100_000 else 100)
    for number, batch in enumerate(_batches(size, rows, warm_up + repeats)):
        for growing, step in kinds.items():
            began = time.perf_counter()
            step(batch[growing])
            if number >= warm_up:
                seconds[growing].append(time.perf_counter() - began)
    return statistics.median(seconds[False]), statistics.median(seconds[True])


def _step(size: int, rows: int, growing: Growing | None) -> TrainStep:
    torch.manual_seed(0)
    tables = tuple(Table(name=f"c{i}", rows=rows, growing=growing) for i in range(COLUMNS))
    schema = FeatureSchema(tables=tables, numeric=tuple(f"n{i}" for i in range(NUMBERS)))
    model = build_model(parsed(stacked("dlrm", "linear")), schema).train()
    return TrainStep(model, TrainingConfig(batch_size=size, precision="fp32", epochs=1))


def _batches(size: int, rows: int, count: int) -> Iterator[dict[bool, LabelledBatch]]:
    """Equal batches with ids and with keys."""
    random = np.random.default_rng(0)
    weights = np.arange(1, rows + 1) ** -1.1
    ends = np.cumsum(weights / weights.sum())
    hashes = random.integers(1, 2**63, rows)
    for _ in range(count):
        ids_BT = np.minimum(np.searchsorted(ends, random.random((size, COLUMNS))), rows - 1)
        numeric = torch.from_numpy(random.standard_normal((size, NUMBERS)).astype(np.float32))
        label = torch.from_numpy((random.random(size) < 0.3).astype(np.float32))
        ids, keys = torch.from_numpy(ids_BT.astype(np.int32)), torch.from_numpy(hashes[ids_BT])
        kinds = ((False, ids, None), (True, torch.zeros_like(ids), Keys(keys, ())))
        yield {
            growing: LabelledBatch(
                features=FeatureBatch(ids_BT=ids_BT, bags=(), numeric_BK=numeric, keys=keys_BG),
                label_B=label,
                weight_B=None,
            )
            for growing, ids_BT, keys_BG in kinds
        }


def stream_table(distinct: int, capacity: int) -> str:
    """Ids that all occur once, admitted at once, through one table without a network."""
    table = Table(
        name="id", rows=capacity + 1, growing=Growing(capacity=capacity, admit_after=1, evict="lru")
    )
    rows = GrowingRows(FeatureSchema(tables=(table,)))
    tables, random = GrowingTables(rows, Ranks()), np.random.default_rng(0)
    empty = torch.empty(STREAMED_AT_ONCE, 0)
    lines, seconds = list[list[str]](), 0.0
    for number in range(-(-distinct // STREAMED_AT_ONCE)):
        keys = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, (STREAMED_AT_ONCE, 1)))
        batch = FeatureBatch(
            ids_BT=torch.zeros(STREAMED_AT_ONCE, 1, dtype=torch.int32),
            bags=(),
            numeric_BK=empty,
            keys=Keys(keys, ()),
        )
        began = time.perf_counter()
        tables.admit(batch)
        seconds += time.perf_counter() - began
        streamed = (number + 1) * STREAMED_AT_ONCE
        if streamed >= distinct * (len(lines) + 1) / 5:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            lines.append([f"{streamed:,}", f"{streamed / seconds / 1e6:.2f}", f"{peak:,.0f}"])
    return markdown(["ids so far", "million ids per second", "process, MiB"], lines)


def ne_table(
    log: Path, columns: Sequence[str], shares: Sequence[float], seeds: int, training: TrainingConfig
) -> str:
    """NE by kind of table, mean and standard error over seeds, and the difference from a vocabulary."""
    launcher = Launcher()
    launcher.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = prepare([log], out=Path(folder) / "vocabulary")
        most = max(table.rows for table in vocabulary.features.tables if table.name in columns)
        logs = {"a vocabulary (values of 2 rows at least)": vocabulary}
        for share in shares:
            capacity = max(1, round(share * most))
            for evict in ("lfu", "lru"):
                given = GivenGrowing.model_validate(
                    {"capacity": capacity, "columns": tuple(columns), "evict": evict}
                )
                name = f"growing, capacity {share:.0%} ({capacity:,}), {evict}"
                logs[name] = prepare(
                    [log], out=Path(folder) / f"{evict}{capacity}", options=ReadOptions(growing=given)
                )
            hashed = _hashed(vocabulary.schema, columns, capacity)
            logs[f"hashed into {capacity:,} fixed rows"] = prepare(
                [log], out=Path(folder) / f"hashed{capacity}", schema=hashed
            )
        rows = [_nes(prepared, launcher, seeds, training) for prepared in logs.values()]
        first = rows[0]
        lines = [
            [name, spread(nes), "" if nes is first else beside(nes, first)]
            for name, nes in zip(logs, rows, strict=True)
        ]
        flops = network_flops(parsed(stacked("dlrm", "linear")), vocabulary)
    head = f"{', '.join(columns)}; {flops / 1e3:.0f} kFLOPs; {seeds} seeds"
    return f"{head}\n\n{markdown(['tables', 'NE', 'less than a vocabulary'], lines)}"


def _nes(log: PreparedLog, launcher: Launcher, seeds: int, training: TrainingConfig) -> list[float]:
    model = parsed(stacked("dlrm", "linear"))
    return [validation_ne(log, launcher, model, training, seed) for seed in range(seeds)]


def _hashed(schema: LogSchema, columns: Sequence[str], buckets: int) -> LogSchema:
    changed = {name: schema.tables[name].replace(hash_buckets=buckets) for name in columns}
    return schema.replace(columns={**schema.columns, **changed})


if __name__ == "__main__":
    main()
