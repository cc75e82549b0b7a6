"""What benchmarks run on here: a small log, a small study."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import SMALL, run_here, write_log


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """Nothing that a benchmark sets stays."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 rows with every kind of column."""
    return write_log(tmp_path_factory.mktemp("log") / "clicks.csv", 1500)


@pytest.fixture(scope="session")
def study(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a finished study of three candidates."""
    out = tmp_path_factory.mktemp("runs") / "study"
    done = run_here(("run", "--data", log, "--out", out, "trials=3", *SMALL), {}, None)
    assert done.returncode == 0, done.stderr
    return out
