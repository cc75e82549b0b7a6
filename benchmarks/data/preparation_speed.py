"""How fast a log is prepared, and in how much memory.

    python -m benchmarks.data.preparation_speed [--rows 100000 1000000]

Writes Criteo-format logs with the same distinct ids, whatever their length, prepares each in a process of
its own, and prints a table. Memory should not grow with the rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
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


def measure(path: Path, out: Path) -> dict[str, float]:
    """Seconds and peak resident bytes of preparing a log, in a fresh process."""
    command = [sys.executable, __file__, "--one", str(path), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return dict(json.loads(output))


def prepare_one(path: Path, out: Path) -> None:
    """The process that is measured: prints its seconds and its peak memory."""
    from trials.data.prepare.prepare_log import prepare

    before_bytes, begin = _peak_bytes(), time.perf_counter()
    prepare([path], out=out)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak_bytes": _peak_bytes(), "before_bytes": before_bytes}))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=DEFAULT_ROWS)
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        prepare_one(*arguments.one)
        return
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {sum(DISTINCT):,} distinct ids"
    )
    print("|      rows | text MiB | seconds | rows/s | peak RSS MiB | imports alone MiB |")
    print("| --------: | -------: | ------: | -----: | -----------: | ----------------: |")
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.tsv"
            write_log(path, rows)
            found = measure(path, Path(folder) / "prepared")
            text = path.stat().st_size / 2**20
        seconds, peak, before = found["seconds"], found["peak_bytes"] / 2**20, found["before_bytes"] / 2**20
        speed = f"{seconds:7.2f} | {rows / seconds:6,.0f}"
        print(f"| {rows:9,} | {text:8.0f} | {speed} | {peak:12,.0f} | {before:17,.0f} |")


if __name__ == "__main__":
    main()
