"""What pulling and pushing rows costs: milliseconds of a step's lookup and update of tables on a server, and here.

    python -m benchmarks.servers.pull_and_push

Eight tables in one process, and the same ones on one or two servers in processes of their own, on the same
batches: lookup with gradients recorded, then the update. On servers that is a pull, and a push until it is in the
tables. Ids are drawn by Zipf's law with exponent 1.1. Bytes are what a step sends and gets, both ways together."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.models.one_network import parsed, stacked
from benchmarks.servers.table_server import start_server
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.batch import FeatureBatch
from dhen.model import build_model
from dhen.schema import FeatureSchema, Table
from trials.data.loader import LabelledBatch
from trials.planner.table_servers import ServedTables
from trials.records.job import Job, TablesConfig, TrainingConfig
from trials.training.distributed.engine import take_tables
from trials.training.embeddings.engine import LocalTables
from trials.training.process_group import meeting_of_servers
from trials.training.servers.client import Servers
from trials.training.servers.server_tables import ServerTables

COLUMNS, EXPONENT, CPU = 8, 1.1, torch.device("cpu")
WARM_UP = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="Of each of eight tables.")
    parser.add_argument("--batches", type=int, nargs="+", default=(256, 1024, 4096))
    parser.add_argument("--dims", type=int, nargs="+", default=(8, 32, 128))
    parser.add_argument("--servers", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}, one thread per process; {COLUMNS} tables of {options.rows:,} rows\n")
    rows = [
        _row(options.rows, size, dim, options.servers, options.steps)
        for dim in options.dims
        for size in options.batches
    ]
    counts = [f"{count} server(s), ms (times here)" for count in options.servers]
    print(markdown(["dimension", "batch", "here, ms", *counts, "MiB per step"], rows))


def job_of(rows: int, size: int, dim: int, tables: TablesConfig) -> Job:
    """A job of eight tables, whose dense part is never run."""
    schema = FeatureSchema(
        tables=tuple(Table(name=f"c{i}", rows=rows) for i in range(COLUMNS)), numeric=("n",)
    )
    model = parsed(stacked("linear", layers=1) | {"embedding_dim": dim})
    training = TrainingConfig(batch_size=size, precision="fp32", epochs=1, tables=tables)
    return Job(model=model, features=schema, log="", training=training, seed=0)


def _row(rows: int, size: int, dim: int, counts: Sequence[int], steps: int) -> list[str]:
    batches = _batches(rows, size)
    job = job_of(rows, size, dim, TablesConfig(synchrony="sync"))
    model = build_model(job.model, job.features)
    tables = take_tables(model)
    assert tables is not None
    local = LocalTables(tables, job.training)
    here = [_local_ms(local, batch) for batch in _turns(batches, steps)][WARM_UP:]
    cells = [str(dim), f"{size:,}", f"{statistics.median(here):.2f}"]
    for count in counts:
        served = statistics.median(_served_ms(job, batches, count, steps))
        cells.append(f"{served:.2f} ({served / statistics.median(here):.1f})")
    sizes = ServedTables(job.features.tables, (dim,) * COLUMNS, size, 4, 4)
    unique = statistics.mean(
        len(torch.unique(batch.features.ids_BT[:, i])) for batch in batches for i in range(COLUMNS)
    )
    share = unique * COLUMNS / sizes.rows_pulled
    return [*cells, f"{2 * share * sizes.pulled_bytes / 2**20:.2f}"]


def _batches(rows: int, size: int) -> list[LabelledBatch]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(8):
        ids = (rng.zipf(EXPONENT, (size, COLUMNS)) - 1) % rows
        features = FeatureBatch(ids_BT=torch.from_numpy(ids), bags=(), numeric_BK=torch.zeros(size, 1))
        found.append(LabelledBatch(features=features, label_B=torch.zeros(size), weight_B=None))
    return found


def _turns(batches: Sequence[LabelledBatch], steps: int) -> list[LabelledBatch]:
    return [batches[step % len(batches)] for step in range(steps + WARM_UP)]


def _local_ms(tables: LocalTables, batch: LabelledBatch) -> float:
    began = time.perf_counter()
    embeddings = tables.lookup(batch.features)
    for embedding in embeddings:
        embedding.grad = torch.ones_like(embedding)
    tables.update(embeddings)
    return 1000.0 * (time.perf_counter() - began)


def _served_ms(job: Job, batches: Sequence[LabelledBatch], count: int, steps: int) -> list[float]:
    """Milliseconds of each step against so many servers."""
    with tempfile.TemporaryDirectory() as folder:
        started = [start_server(job, Path(folder), number, count) for number in range(count)]
        servers = Servers(meeting_of_servers(Path(folder), None, makes=True), 0, 1, count)
        tables = take_tables(build_model(job.model, job.features))
        assert tables is not None
        engine, found = ServerTables(tables, None, job.training, servers, CPU), []
        engine.go_on(0, None)
        for batch in _turns(batches, steps):
            began = time.perf_counter()
            embeddings = engine.lookup(engine.of_batch(batch))
            for embedding in embeddings:
                embedding.grad = torch.ones_like(embedding)
            engine.update(embeddings)
            engine.settle()
            found.append(1000.0 * (time.perf_counter() - began))
        servers.leave()
        for process in started:
            process.join()
    return found[WARM_UP:]


if __name__ == "__main__":
    main()
