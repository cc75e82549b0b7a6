"""The command line as a user runs it, and small logs to run it on."""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from warm_process import COMMAND_LINE, WarmProcess

from search.cli import main

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).parent / "dhen-search"
EARLY_CHECKPOINTS = (sys.executable, str(Path(__file__).with_name("early_checkpoints.py")))
"""The command, with a checkpoint after each evaluation."""
EARLY_CHECKPOINTS_CODE = "import early_checkpoints; early_checkpoints.main()"
"""The same for `start`."""
TIMEOUT_SECONDS = 300
TRAINED, LATER = 3000, 6600
"""Numbers of the earlier rows of two logs, and of all rows of both."""
SMALL = ("space=tiny", "training.epochs=2", "baseline_trials=1", "threads=1", "parallel=1")
"""Settings that make a study of seconds, the same on every machine."""
AVERAGED = ("trials=3", "averages=3", "confirm=2", "block_by=site", "seed=3", *SMALL)
"""The study of the fixture `averaged`."""
GROWING_MODEL = "model: {family: dhen, embedding_dim: 4, layers: [{modules: [{kind: dlrm}, {kind: linear}]}]}"
FIXED = "user: {role: categorical, min_count: 2, hash_buckets: auto}"
GROWING = "user: {role: categorical, table: {growing: {capacity: 12, evict: lru}}}"
"""The column of users in a schema as it is inferred, and with a growing table."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def looks_at_test(directory: Path) -> int:
    """Number of looks at test that the study in a run directory has counted."""
    with sqlite3.connect(directory / "study.db") as connection:
        return int(connection.execute("select count(*) from dhen_test_look").fetchone()[0])


def run_here(
    words: tuple[object, ...], environment: dict[str, str], cwd: Path | None
) -> subprocess.CompletedProcess[str]:
    """The console script's function in this process, which saves the imports; what it starts are processes."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    code = 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        for name, value in environment.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                main([*map(str, words)])
            except SystemExit as ended:
                code = int(ended.code or 0)
    said, errors = (stream.buffer.getvalue().decode() for stream in streams)
    return subprocess.CompletedProcess(words, code, said, errors)


def run_process(
    words: tuple[object, ...], environment: dict[str, str], cwd: Path | None
) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it."""
    process = WarmProcess(words, environment, cwd=cwd)
    said, errors = process.communicate(TIMEOUT_SECONDS)
    return subprocess.CompletedProcess(words, process.wait(), said, errors)


def output_of(verb: str) -> Any:
    """The shape of what a verb prints with `--json`; None for a verb that reports nothing."""
    shape = getattr(import_module(f"search.verbs.{verb}"), "OUTPUT", None)
    if isinstance(shape, str):
        module, _, name = shape.partition(":")
        return getattr(import_module(module), name)
    return shape


def check_json(verb: str, printed: str) -> None:
    """Checks that what was printed is a value of the verb's shape and nothing else."""
    shape: TypeAdapter[Any] = TypeAdapter(output_of(verb))
    value = shape.validate_json(printed)
    assert json.loads(shape.dump_json(value)) == json.loads(printed)


def start(
    log: Path, out: Path, environment: dict[str, str], *words: str, code: str = COMMAND_LINE
) -> WarmProcess:
    """A small study that goes on by itself; `words` come after the small settings."""
    return WarmProcess(("run", "--data", log, "--out", out, *SMALL, *words), environment, code=code)


def wait_until(condition: Callable[[], object], process: WarmProcess | None = None) -> None:
    """Until something is so, or a process that should bring it about has ended."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not get that far"
        time.sleep(0.02)


def wait_for_trials(out: Path, number: int) -> None:
    """Until the trial with this number has begun."""
    wait_until((out / "trials" / f"{number:05d}" / "events.jsonl").exists)


def write_two_logs(folder: Path) -> tuple[Path, Path]:
    """Writes earlier rows and later ones, `TRAINED` and `LATER` - `TRAINED` of them, a row a minute."""
    header, *rows = write_log(folder / "all.csv", LATER).read_text().splitlines()
    earlier, later = folder / "earlier.csv", folder / "later.csv"
    earlier.write_text("\n".join([header, *rows[:TRAINED]]) + "\n")
    later.write_text("\n".join([header, *rows[TRAINED:]]) + "\n")
    return earlier, later


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


def free_port() -> int:
    """A port that nobody listens at, for a server that is told its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_ui(*words: object) -> WarmProcess:
    """`dhen-search ui` in a process of its own, as a shell would start it."""
    return WarmProcess(("ui", *words), os.environ, cwd=ROOT)


def read_until(process: WarmProcess, wanted: str) -> str:
    """What it prints, up to the line that has these words."""
    said = ""
    for line in process.stdout:
        said += line
        if wanted in line:
            return said
    raise AssertionError(said)


def end_ui(process: WarmProcess) -> None:
    """Ends it by Ctrl-C, which it answers with exit code 0."""
    process.send_signal(signal.SIGINT)
    process.communicate(TIMEOUT_SECONDS)
    assert process.returncode == 0
