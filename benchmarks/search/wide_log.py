"""Whether a study of a log as wide as the paper's keeps its minutes and a memory.

    python -m benchmarks.search.wide_log out --minutes 8
    python -m benchmarks.search.wide_log out --rows 20000 --categorical 100 --numeric 500 --minutes 3

Writes the log from a seed into the folder, if it isn't there, runs the whole command on it into a new folder
there, and prints the time it took, its candidates, and the peak memory of the largest rank. A log that was
prepared before isn't prepared again: without its folder in the cache the minutes hold that too.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv

from benchmarks.shared.machine_and_tables import machine, markdown
from search.read_study import read_study

CHUNK_ROWS = 5_000
INFORMATIVE = 20
"""Columns of each kind on which the label depends; the others are noise, as most are in so wide a log."""
BIAS = -1.5


def write_wide_log(path: Path, rows: int, categorical: int, numeric: int, *, seed: int = 0) -> None:
    """Writes a CSV file with `label`, text ids `c0`, `c1` ... and numbers `n0`, `n1` ..., a chunk at a time.

    A column has between 3 and 3,000 distinct ids, Zipf-like. Numbers are normal or, every third, lognormal.
    """
    rng = np.random.default_rng(seed)
    counts = np.round(np.geomspace(3, 3_000, categorical)).astype(int)
    known = rng.permutation(categorical)[:INFORMATIVE]
    effects = {int(column): rng.normal(0, 0.4, counts[column]) for column in known}
    weights = rng.normal(0, 0.3, min(INFORMATIVE, numeric))
    texts = [pa.array([f"{column}:{i}" for i in range(count)]) for column, count in enumerate(counts)]
    names = ["label", *(f"c{i}" for i in range(categorical)), *(f"n{i}" for i in range(numeric))]
    types = [pa.int8(), *[pa.string()] * categorical, *[pa.float64()] * numeric]
    schema = pa.schema(list(zip(names, types, strict=True)))
    with pv.CSVWriter(path, schema) as writer:
        for first in range(0, rows, CHUNK_ROWS):
            n = min(CHUNK_ROWS, rows - first)
            ids = [(count ** rng.random(n) - 1).astype(int) for count in counts]
            number_NF = rng.normal(size=(n, numeric))
            log_odds = BIAS + number_NF[:, : len(weights)] @ weights
            for column, effect in effects.items():
                log_odds += effect[ids[column]]
            log_odds += 0.3 * number_NF[:, 0] * number_NF[:, min(1, numeric - 1)]
            label = (rng.random(n) < 1 / (1 + np.exp(-log_odds))).astype(np.int8)
            number_NF[:, 2::3] = np.exp(number_NF[:, 2::3])
            columns = [
                pa.array(label),
                *(text.take(pa.array(column)) for text, column in zip(texts, ids, strict=True)),
                *(pa.array(column) for column in np.round(number_NF, 3).T),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def measured(log: Path, out: Path, words: list[str], minutes: float) -> dict[str, str]:
    """What one study of the log has taken, run as a user runs it into a folder that isn't there yet."""
    command = [str(Path(sys.executable).parent / "dhen-search"), "run", "--data", str(log), "--out", str(out)]
    began = time.perf_counter()
    subprocess.run([*command, *words, f"minutes={minutes:g}"], check=True)
    taken = time.perf_counter() - began
    record = read_study(out)
    ended = Counter(str(trial.result.outcome) for trial in record.candidates)
    peaks = [trial.result.measured.peak_memory_bytes or 0 for trial in record.trials]
    return {
        "minutes": f"{minutes:g}",
        "taken, s": f"{taken:.0f}",
        "off": f"{100 * (taken / (60 * minutes) - 1):+.1f} %",
        "candidates": ", ".join(f"{count} {outcome}" for outcome, count in ended.items()) or "0",
        "largest rank, GiB": f"{max(peaks, default=0) / 2**30:.2f}",
        "largest process, GiB": f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--categorical", type=int, default=300)
    parser.add_argument("--numeric", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = arguments.rows, arguments.categorical, arguments.numeric
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"wide-{'-'.join(map(str, shape))}-{arguments.seed}.csv"
    if not log.exists():
        write_wide_log(log, *shape, seed=arguments.seed)
    study = Path(tempfile.mkdtemp(dir=folder)) / "study"
    row = measured(log, study, arguments.words, arguments.minutes)
    print(f"{machine()}; {log.name}; {study}\n\n{markdown(tuple(row), [list(row.values())])}")


if __name__ == "__main__":
    main()
