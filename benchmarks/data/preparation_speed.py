"""How fast a log is prepared, and in how much memory.

    python -m benchmarks.data.preparation_speed [--rows 100000 1000000] [--cores 1 2]

Writes Criteo-format logs with the same distinct ids, whatever their length, prepares each in a process of
its own, on so many cores (all by default), and prints a table. Memory should not grow with the rows. Busy
cores: seconds of CPU time per second. The caches must be equal on any number of cores.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from trials.data.raw.sources import CRITEO_COLUMNS

DEFAULT_ROWS = (100_000, 1_000_000, 5_000_000)
DISTINCT = tuple(round(10 ** (1 + 4 * i / 25)) for i in range(26))
"""Values of each categorical column: 10 to 100,000."""
CHUNK_ROWS = 100_000
VALUES = [pa.array(f"{(value + 1) * 2654435761 % 2**32:08x}" for value in range(count)) for count in DISTINCT]


def chunk(rows: int, rng: np.random.Generator) -> pa.Table:
    """Clicks at random, heavy-tailed counts of which a fifth is missing, ids with a Zipf-like distribution."""
    columns = [pa.array((rng.random(rows) < 0.25).astype(np.int8))]
    for _ in range(13):
        counts = np.floor(rng.lognormal(2.0, 1.5, rows)).astype(np.int64)
        columns.append(pa.array(counts, mask=rng.random(rows) < 0.2))
    for values in VALUES:
        columns.append(values.take(pa.array((len(values) ** rng.random(rows)).astype(np.int64) - 1)))
    return pa.table(dict(zip(CRITEO_COLUMNS, columns, strict=True)))


def write_log(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    options = pacsv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with path.open("wb") as file:
        for first in range(0, rows, CHUNK_ROWS):
            pacsv.write_csv(chunk(min(CHUNK_ROWS, rows - first), rng), file, options)


def measure(path: Path, out: Path, cores: int) -> dict[str, float]:
    """Seconds and peak resident bytes of preparing a log, in a fresh process that has so many cores."""
    command = [sys.executable, __file__, "--cores", str(cores), "--one", str(path), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return dict(json.loads(output))


def prepare_one(path: Path, out: Path, cores: int) -> None:
    """The process that is measured: prints its seconds and its peak memory."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # before anything counts the cores
    from trials.data.prepare.prepare_log import prepare

    before_bytes, begin, worked = _peak_bytes(), time.perf_counter(), time.process_time()
    prepare([path], out=out)
    seconds, busy = time.perf_counter() - begin, time.process_time() - worked
    measured = {"seconds": seconds, "busy_seconds": busy, "peak_bytes": _peak_bytes()}
    print(json.dumps(measured | {"before_bytes": before_bytes}))


def contents(directory: Path) -> dict[str, str]:
    """Hashes of a cache's files, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row(rows: int, cores: int, text_mib: float, found: dict[str, float]) -> str:
    seconds, peak, before = found["seconds"], found["peak_bytes"] / 2**20, found["before_bytes"] / 2**20
    speed = f"{seconds:7.2f} | {rows / seconds:6,.0f} | {found['busy_seconds'] / seconds:10.2f}"
    return f"| {rows:9,} | {cores:5} | {text_mib:8.0f} | {speed} | {peak:12,.0f} | {before:17,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=DEFAULT_ROWS)
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        log, out = arguments.one
        prepare_one(log, out, arguments.cores[0])
        return
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {sum(DISTINCT):,} distinct ids"
    )
    print(
        "|      rows | cores | text MiB | seconds | rows/s | busy cores | peak RSS MiB | imports alone MiB |"
    )
    print(
        "| --------: | ----: | -------: | ------: | -----: | ---------: | -----------: | ----------------: |"
    )
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.tsv"
            write_log(path, rows)
            text, caches = path.stat().st_size / 2**20, []
            for cores in arguments.cores:
                out = Path(folder) / f"prepared{cores}"
                found = measure(path, out, cores)
                caches.append(contents(out))
                shutil.rmtree(out)
                print(row(rows, cores, text, found), flush=True)
        if any(cache != caches[0] for cache in caches):
            sys.exit("the caches differ between numbers of cores")


if __name__ == "__main__":
    main()
