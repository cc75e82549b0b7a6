"""What it costs in NE that rows lack the latest updates: servers with a delay of s steps, and ranks on their own.

NE on validation in percent of local training's, paired by seed, with a t-interval over seeds, for a light and a
heavy dense part. The delay is exact (`training.tables.deterministic_delay`), of one rank, so that nothing but
the delay differs from local training; with `async` two or four ranks train on whole batches of their own. What
is trained is kept in a file, and not trained again.

    python -m benchmarks.servers.staleness demo --out demo.jsonl [--demo-rows 100000] [--seeds 5]
    python -m benchmarks.servers.staleness log.csv --out log.jsonl --passes 3
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models.one_network import network_flops, parsed
from benchmarks.servers.watched_training import DENSE, served_job, served_task, watched
from benchmarks.shared.kept_trainings import half_interval, keep, kept
from benchmarks.shared.log_or_demo import log_or_demo
from benchmarks.shared.machine_and_tables import machine, markdown
from trials.data.prepared_log import PreparedLog
from trials.records.events import TrainingEvent
from trials.records.job import Job, TablesConfig, TrainingConfig
from trials.records.strategy import named
from trials.runtime.launcher import Launcher

LOCAL, DELAYS, WORKERS = "local", (0, 1, 2, 4, 8, 16), (2, 4)
Found = dict[tuple[str, str, int], dict[str, Any]]
"""What a training came to, by dense part, way and seed."""


def ways() -> dict[str, tuple[TablesConfig, str, int]]:
    """How tables are kept up with, the strategy, and the number of ranks, by name."""
    found = {LOCAL: (TablesConfig(), "dp", 1)}
    for delay in DELAYS:
        config = TablesConfig(synchrony="semi", staleness=delay, deterministic_delay=True)
        found[f"delay of {delay}"] = config, "dp+servers1", 1
    for workers in WORKERS:
        found[f"async, {workers} workers"] = TablesConfig(synchrony="async"), "dp+servers1", workers
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is not in the file yet, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="where each training's NE is kept")
    parser.add_argument("--demo-rows", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds: an interval needs two at least")
    log = log_or_demo(options.data, options.demo_rows)
    training = TrainingConfig(epochs=options.passes, batch_size=options.batch_size)
    found = trained(log, training, options.seeds, options.out)
    steps = options.passes * (log.manifest.rows["train"] // options.batch_size)
    print(
        f"{machine()}; {log.manifest.rows['train']:,} training rows, {steps:,} steps of {options.batch_size}"
    )
    for dense in DENSE:
        print(f"\n{dense}: {network_flops(parsed(DENSE[dense]), log):,.0f} FLOPs per example\n")
        print(table(dense, found, options.seeds))


def trained(log: PreparedLog, training: TrainingConfig, seeds: int, out: Path) -> Found:
    """What all trainings came to; the file's lines count where they are of this log and these settings."""
    asked = {"log": log.fingerprint, "passes": training.epochs, "batch_size": training.batch_size}
    found: Found = {}
    for line in kept(out, asked):
        found[line["dense"], line["way"], line["seed"]] = line
    launcher = Launcher()
    for seed in range(seeds):  # seed by seed: what is there after an interruption is a table of fewer seeds
        for dense in DENSE:
            for way, (tables, strategy, ranks) in ways().items():
                if (dense, way, seed) in found:
                    continue
                job = served_job(log, dense, tables, training, seed)
                line = {**asked, "dense": dense, "way": way, "seed": seed}
                line |= _trained_once(launcher, log, job, strategy, ranks)
                found[dense, way, seed] = line
                keep(out, line)
                print(dense, way, seed, f"{line['ne']:.5f}", file=sys.stderr, flush=True)
    return found


def _trained_once(
    launcher: Launcher, log: PreparedLog, job: Job, strategy: str, ranks: int
) -> dict[str, Any]:
    """Best NE on validation, and the mean number of steps that rows lacked."""
    with tempfile.TemporaryDirectory() as folder:
        events = watched(launcher, served_task(log, job, named(strategy), ranks), Path(folder))
    for event in events:
        if isinstance(event, TrainingEvent):
            lacked = event.measured.numbers["staleness"]
            return {"ne": event.best.ne, "lacked": lacked if event.measured.staleness else 0.0}
    return {"ne": float("nan"), "lacked": float("nan")}


def table(dense: str, found: Found, seeds: int) -> str:
    """A row per way: NE, and percent of local training's with its interval."""
    rows = []
    local = np.array([found[dense, LOCAL, seed]["ne"] for seed in range(seeds)])
    for way in ways():
        ne = np.array([found[dense, way, seed]["ne"] for seed in range(seeds)])
        lacked = np.mean([found[dense, way, seed]["lacked"] for seed in range(seeds)])
        percent = 100 * (ne / local - 1)
        beside = "" if way == LOCAL else f"{percent.mean():+.3f} ± {half_interval(percent):.3f} %"
        rows.append([way, f"{ne.mean():.5f}", beside, f"{lacked:.2f}"])
    return markdown(["tables", "NE, mean", "to local", "steps lacked, mean"], rows)


if __name__ == "__main__":
    main()
