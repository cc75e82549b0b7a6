"""The command line as a user runs it, on small logs made here."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from command_line import SMALL, Run, check_json, run_here, run_process, write_log


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Processes started here hear Ctrl-C, also where the tests run in a shell's background, which does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def environment(_cache_of_tests: None) -> dict[str, str]:
    """With the tests' own cache; the terminal is a pipe."""
    return dict(os.environ)


@pytest.fixture(scope="session")
def dhen_search(environment: dict[str, str]) -> Run:
    """Runs the command in this process; `code` is the exit code expected."""
    return checked(run_here, environment)


@pytest.fixture(scope="session")
def dhen_search_process(environment: dict[str, str]) -> Run:
    """The same in a process of its own, seconds slower: for what only a fresh one shows."""
    return checked(run_process, environment)


def checked(how: Callable[..., subprocess.CompletedProcess[str]], environment: dict[str, str]) -> Run:
    """Ends with the code that is expected, and without a traceback; with `--json` in the verb's shape."""

    def run(*words: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = how(words, environment, cwd)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        if "--json" in words and code == 0:
            check_json(str(words[0]), done.stdout)
        return done

    return run


@pytest.fixture(scope="session")
def click_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 rows with a label."""
    return write_log(tmp_path_factory.mktemp("log") / "clicks.csv", 4000)


@pytest.fixture(scope="session")
def study(dhen_search_process: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a finished study of four candidates."""
    out = tmp_path_factory.mktemp("runs") / "study"
    dhen_search_process("run", "--data", click_log, "--out", out, "trials=4", *SMALL)
    return out


@pytest.fixture
def unsynced() -> Iterator[None]:
    """Databases do not wait for the disk at each commit: what is tested is no crash of the machine."""

    def without_sync(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    sa.event.listen(sa.Engine, "connect", without_sync)
    yield
    sa.event.remove(sa.Engine, "connect", without_sync)
