"""Resident memory of a worker by the size of the embedding tables, with and without `--mmap`; equal scores.

    python -m benchmarks.serving.memory --gb 0.1 1 2

A network is trained on a generated log, and its bundle gets a table of hashed users as large as is asked for, with
weights drawn at random. Requests are of users drawn at random, so nearly each reads a row that none has read.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from benchmarks.models.one_network import stacked
from benchmarks.serving.server import COMMAND, Resident, Running, serving, without_threads
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.atomic_write import atomic_folder
from dhen.model import build_model
from search.bundles.bundle import Bundle, read_bundle, weights_names, write_beside_weights
from trials.data.prepared_log import PreparedLog
from trials.store.weights import save_weights

ROWS = 4000
"""Rows of the log."""
COLUMN = "user"
SIZE = 256
"""Rows of a request."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves a bundle of each size in both ways, and prints a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0, 2.0], help="10^9 bytes of tables")
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args(arguments)
    without_threads()
    print(f"{machine()}\n")
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log.csv"
        _run("demo", "--out", log, f"rows={ROWS}", "users=2000", "items=300")
        (folder / "model.yaml").write_text(yaml.safe_dump({"model": stacked("dlrm", "linear")}))
        _run("prepare", log, "--out", folder / "log")
        _run(
            "train",
            folder / "model.yaml",
            "--data",
            folder / "log",
            "--out",
            folder / "small",
            "training.epochs=1",
        )
        for gb in options.gb:
            bundle = _enlarged(read_bundle(folder / "small"), log, folder, gb)
            lines += _rows(bundle, gb, _requests(log, options.requests))
    header = ["tables, GB", "served", "s to start", "MiB of its own", "MiB of files"]
    header += [f"after {options.requests} requests: MiB of its own", "MiB of files"]
    header += ["median ms of a request", "asked again", "scores"]
    print(markdown(header, lines))


def _run(*words: object) -> None:
    subprocess.run([*COMMAND, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def _enlarged(bundle: Bundle, log: Path, folder: Path, gb: float) -> Path:
    """Writes the bundle with a table of so many bytes for the column, hashed into buckets."""
    job, place = bundle.job(), folder / f"log-{gb}"
    data = yaml.safe_load((folder / "log" / "schema.yaml").read_text())
    buckets = int(gb * 1e9 / (4 * job.model.embedding_dim))
    data["columns"][COLUMN] = {"role": "categorical", "hash_buckets": buckets}
    place.mkdir()
    (place / "schema.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    _run("prepare", log, "--out", place)
    large = PreparedLog.open(place)
    job, out = job.replace(features=large.features), folder / f"bundle-{gb}"
    info = bundle.info.replace(job=job)
    torch.manual_seed(0)
    with atomic_folder(out) as building:
        save_weights(build_model(job.model, job.features).state_dict(), building / weights_names(info)[0])
        write_beside_weights(building, info, large.encoding, large.split("validation").inputs, bundle.serving)
    return out


def _requests(log: Path, count: int) -> list[list[dict[str, object]]]:
    """Rows of the log with users drawn at random."""
    drawn = random.Random(0)
    with log.open(newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file), SIZE))
    return [[{**row, COLUMN: str(drawn.getrandbits(60))} for row in rows] for _ in range(count)]


def _rows(bundle: Path, gb: float, requests: Sequence[list[dict[str, object]]]) -> list[list[object]]:
    found, scores = list[list[object]](), []
    for words in ((), ("--mmap",)):
        with serving(bundle, *words) as server:
            start = server.resident()
            first, milliseconds = _asked(server, requests)
            end = server.resident()
            again = _asked(server, requests)[1]
        scores.append(first)
        equal = "" if not words else "equal" if scores[0] == scores[1] else "DIFFERENT"
        label = " ".join(words) or "in memory"
        times = [f"{milliseconds:.1f}", f"{again:.1f}"]
        found.append([gb, label, f"{server.seconds:.1f}", *_mib(start), *_mib(end), *times, equal])
    return found


def _mib(resident: Resident) -> list[str]:
    return [f"{resident.own:,.0f}", f"{resident.files:,.0f}"]


def _asked(server: Running, requests: Sequence[list[dict[str, object]]]) -> tuple[list[float], float]:
    """Returns the scores of all requests, and the median time of one."""
    scores, times = list[float](), []
    for request in requests:
        began = time.perf_counter()
        scores += server.predictions(request)
        times.append(1000 * (time.perf_counter() - began))
    return scores, statistics.median(times)


if __name__ == "__main__":
    main()
