"""Candidates an hour of whole studies, as a user runs them, under several settings, one after the other.

Wall clock from the command to its end: start-up, baseline, candidates, test scores, report and bundle; the log is
prepared beforehand. Proposals are random here, so that settings with equal `threads` train the same candidates
(with other threads sums are added in another order, and a space's start points follow the baseline that won).

    python -m benchmarks.search.candidates_per_hour demo trials=12
        --settings 'parallel=1 threads=2' 'parallel=2 threads=1'
    python -m benchmarks.search.candidates_per_hour log.csv trials=20
        --settings 'parallel=1' 'parallel=2' --repeats 3

`--command` names the `dhen-search` of another installation, to compare with another version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.machine_and_tables import machine, markdown


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One study."""

    seconds: float
    candidates: int
    trained: int
    best_ne: float
    test_ne: float


def run_study(command: str, log: str, words: list[str], settings: str) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "study")
        began = time.perf_counter()
        run = [command, "run", "--data", log, "--out", out, *words, *settings.split()]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        status = subprocess.run([command, "status", out, "--json"], check=True, capture_output=True)
    record: dict[str, Any] = json.loads(status.stdout)
    candidates = [trial for trial in record["trials"] if trial["kind"] == "candidate"]
    best = next(trial for trial in record["trials"] if trial["number"] == record["best"])
    return Finding(
        seconds=seconds,
        candidates=len(candidates),
        trained=sum(trial["origin"]["reused_from"] is None for trial in record["trials"]),
        best_ne=best["result"]["validation"]["ne"],
        test_ne=best["result"]["test"]["ne"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--settings", nargs="+", default=["parallel=1", "parallel=2"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--command", default=str(Path(sys.executable).parent / "dhen-search"))
    arguments = parser.parse_args()
    words = ["sampler=random", "grow=no", *arguments.words]
    warm_up = [*words, "trials=1", "baseline_trials=1", "training.epochs=1"]
    run_study(arguments.command, arguments.log, warm_up, arguments.settings[0])  # prepares the log
    found: dict[str, list[Finding]] = defaultdict(list)
    for repeat in range(arguments.repeats):
        for settings in arguments.settings:
            print(f"{repeat + 1} of {arguments.repeats}: {settings} ...", file=sys.stderr, flush=True)
            found[settings].append(run_study(arguments.command, arguments.log, words, settings))
    print(machine())
    print(f"{arguments.log} {' '.join(words)}, medians of {arguments.repeats}")
    rows = []
    for settings, findings in found.items():
        seconds = statistics.median(each.seconds for each in findings)
        one = findings[0]
        rate = f"{3600 * one.candidates / seconds:,.0f}"
        quality = (f"{one.best_ne:.5f}", f"{one.test_ne:.5f}")
        rows.append([settings, one.candidates, one.trained, f"{seconds:,.0f}", rate, *quality])
    header = ["settings", "candidates", "trained", "seconds", "candidates an hour", "best NE", "its test NE"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
