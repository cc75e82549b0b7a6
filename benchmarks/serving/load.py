"""Latency and throughput of `serve`, asked by wrk over loopback.

    python -m benchmarks.serving.load runs/demo/best rows.parquet
    python -m benchmarks.serving.load runs/demo/best rows.parquet --also mlflow=http://127.0.0.1:5001

For each number of workers and each number of rows per request: with one connection, the median and the 99th
percentile of a request's time; with several, requests and rows per second, and the server's CPU time per request.
Requests differ, so that rows of tables are read in other places. `--also` asks another server that speaks the
protocol and is running already. wrk is Debian's package of that name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.serving.server import HOST, serving, without_threads
from benchmarks.shared.machine_and_tables import machine, markdown
from search.bundles.bundle import read_bundle
from trials.data.raw.readers import BadRows, read_batches
from trials.data.raw.sources import open_log

REQUESTS = 16
"""Number of different requests, sent in turn."""
MANY = 8
"""Connections that ask at the same time, for throughput."""
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
SCRIPT = """
local bodies = {}
for i = 1, COUNT do
  local file = io.open("FOLDER/" .. i .. ".json")
  bodies[i] = file:read("*a")
  file:close()
end
local i = 0
request = function()
  i = i % COUNT + 1
  return wrk.format("POST", "/invocations", { ["Content-Type"] = "application/json" }, bodies[i])
end
"""


class Asked(NamedTuple):
    """A server that is asked."""

    label: str
    address: str
    cpu_seconds: Callable[[], float] | None
    """Its CPU time so far; None if its processes are not known."""


class Load(NamedTuple):
    """What wrk measured."""

    median_ms: float
    p99_ms: float
    requests_per_second: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts a server for each number of workers, asks it, and prints a row for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("log", type=Path, help="raw rows")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=URL")
    options = parser.parse_args(arguments)
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed; on Debian: apt-get install wrk")
    without_threads()
    print(f"{machine()}\n")
    with tempfile.TemporaryDirectory() as name:
        bodies = _bodies(Path(name), options.bundle, options.log, options.rows)
        servers = [_ours(options.bundle, workers) for workers in options.workers]
        servers += [_another(one) for one in options.also]
        lines = []
        for server in servers:
            with server as (label, address, cpu):
                for rows, script in bodies.items():
                    lines.append([label, rows, *_measured(address, cpu, script, rows, options.seconds)])
    header = [
        "server",
        "rows per request",
        "median, ms",
        "99 %, ms",
        f"requests/s, {MANY} connections",
        "rows/s",
        "CPU ms per request",
    ]
    print(markdown(header, lines))


@contextlib.contextmanager
def _ours(bundle: Path, workers: int) -> Iterator[Asked]:
    with serving(bundle, "--workers", workers) as server:
        label = f"{workers} worker{'s' if workers > 1 else ''}"
        yield Asked(label, f"http://{HOST}:{server.port}", server.cpu_seconds)


@contextlib.contextmanager
def _another(words: str) -> Iterator[Asked]:
    label, _, address = words.partition("=")
    yield Asked(label, address, None)


def _bodies(folder: Path, bundle: Path, log: Path, sizes: Sequence[int]) -> dict[int, Path]:
    """Writes requests of each size; returns the script that sends them, by size."""
    records = records_of(bundle, log, REQUESTS * max(sizes))
    scripts = {}
    for size in sizes:
        place = folder / str(size)
        place.mkdir()
        for number in range(REQUESTS):
            some = [records[(number * size + i) % len(records)] for i in range(size)]
            (place / f"{number + 1}.json").write_text(json.dumps({"dataframe_records": some}, default=str))
        scripts[size] = place / "requests.lua"
        scripts[size].write_text(SCRIPT.replace("COUNT", str(REQUESTS)).replace("FOLDER", str(place)))
    return scripts


def records_of(bundle: Path, log: Path, count: int) -> list[dict[str, object]]:
    """Returns the first rows of a log, as JSON has them, with the columns that a bundle reads."""
    columns = read_bundle(bundle).encoding.schema.inputs
    table = next(iter(read_batches(open_log([log], None), columns, BadRows(skip=False))))
    return [
        {name: value.decode() if isinstance(value, bytes) else value for name, value in row.items()}
        for row in table.table.slice(0, count).to_pylist()
    ]


def _measured(
    address: str, cpu: Callable[[], float] | None, script: Path, rows: int, seconds: int
) -> list[str]:
    _asked(address, script, 1, 1)  # warms up
    alone = _asked(address, script, 1, seconds)
    before = cpu() if cpu is not None else 0.0
    many = _asked(address, script, MANY, seconds)
    rate = many.requests_per_second
    cost = "" if cpu is None else f"{1000 * (cpu() - before) / (rate * seconds):.1f}"
    return [f"{alone.median_ms:.1f}", f"{alone.p99_ms:.1f}", f"{rate:,.0f}", f"{rate * rows:,.0f}", cost]


def _asked(address: str, script: Path, connections: int, seconds: int) -> Load:
    words = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--timeout",
        "30s",
        "--latency",
        "-s",
        str(script),
    ]
    said = subprocess.run([*words, address], check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(f"requests failed:\n{said}")
    return Load(
        _percentile(said, 50), _percentile(said, 99), float(_found(r"Requests/sec:\s+([\d.]+)", said)[1])
    )


def _percentile(said: str, percent: int) -> float:
    found = _found(rf"\s{percent}%\s+([\d.]+)(us|ms|s|m)\s", said)
    return float(found[1]) * UNITS[found[2]]


def _found(pattern: str, said: str) -> re.Match[str]:
    found = re.search(pattern, said)
    assert found, said
    return found


if __name__ == "__main__":
    main()
