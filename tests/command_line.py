"""The command line as a user runs it, and small logs to run it on."""

from __future__ import annotations

import csv
import datetime
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = Path(sys.executable).parent / "dhen-search"
TIMEOUT_SECONDS = 300
SMALL = ("space=tiny", "training.epochs=2", "baseline_trials=1", "threads=1", "parallel=1")
"""Settings that make a study of seconds, the same on every machine."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def start(log: Path, out: Path, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    """A small study that goes on by itself, in a session of its own; `words` come after the small settings."""
    return subprocess.Popen(
        [str(COMMAND), "run", "--data", str(log), "--out", str(out), *SMALL, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_trials(out: Path, number: int) -> None:
    """Until the trial with this number has begun."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if (out / "trials" / f"{number:05d}" / "events.jsonl").exists():
            return
        time.sleep(0.02)
    raise AssertionError("the study did not get that far")


def write_log(path: Path, rows: int, *, seed: int = 0, label: bool = True) -> Path:
    """A click log with every kind of column; clicks depend on site, price and tags."""
    rng = random.Random(seed)
    start = datetime.datetime(2026, 1, 1)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(["click"] if label else []), "time", "site", "user", "tags", "price", "visits"])
        for row in range(rows):
            site = rng.choice("abcdefgh")
            tags = rng.sample(["x", "y", "z", "w"], rng.randrange(4))
            price = rng.uniform(0, 10)
            odds = -1.5 + 0.4 * "abcdefgh".index(site) - 0.3 * price + 1.0 * ("x" in tags)
            click = int(rng.random() < 1 / (1 + 2.718**-odds))
            stamp = start + datetime.timedelta(minutes=row)
            writer.writerow(
                [
                    *([click] if label else []),
                    stamp.isoformat(sep=" "),
                    site if rng.random() > 0.02 else "",
                    f"u{int(rng.paretovariate(1.1))}",
                    "|".join(tags),
                    f"{price:.3f}" if rng.random() > 0.05 else "",
                    int(rng.expovariate(0.05)),
                ]
            )
    return path
