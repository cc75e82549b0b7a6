"""The command line as a user runs it, on small logs made here."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from command_line import (
    AVERAGED,
    FIXED,
    GROWING,
    GROWING_MODEL,
    SMALL,
    Run,
    check_json,
    run_here,
    write_log,
    write_two_logs,
)
from fake_processes import small_log
from postgresql import Server, served
from shared_studies import shared

from search.mlflow.store import check_store
from trials.data.prepared_log import PreparedLog


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Processes started here hear Ctrl-C, also where the tests run in a shell's background, which does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_core() -> Iterator[None]:
    """Trainings that nobody gives threads have one each, as other files of tests run beside these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search.execution.trainer.cores", lambda: 1)
        yield


@pytest.fixture(scope="session")
def environment(_cache_of_tests: None) -> dict[str, str]:
    """With the tests' own cache; the terminal is a pipe."""
    return dict(os.environ)


@pytest.fixture(scope="session")
def dhen_search(environment: dict[str, str]) -> Run:
    """Runs the command in this process. It ends with the exit code expected and without a traceback; what it
    prints with `--json` has the verb's shape."""

    def run(*words: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = run_here(words, environment, cwd)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        if "--json" in words and code == 0:
            check_json(str(words[0]), done.stdout)
        return done

    return run


@pytest.fixture(scope="session")
def click_log() -> Path:
    """4,000 rows with a label."""
    return shared("log", lambda folder: write_log(folder / "clicks.csv", 4000)) / "clicks.csv"


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    """600 prepared rows, for studies on fake processes."""
    return small_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="session")
def study(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a finished study of four candidates."""

    def make(folder: Path) -> None:
        dhen_search("run", "--data", click_log, "--out", folder / "study", "trials=4", *SMALL)

    return copied_study(shared("study", make) / "study", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def averaged(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module's own copy of a study with averages, whose winners were compared with the baseline."""

    def make(folder: Path) -> None:
        dhen_search("run", "--data", click_log, "--out", folder / "study", *AVERAGED)

    return copied_study(shared("averaged", make) / "study", tmp_path_factory.mktemp("averaged"))


def copied_study(study: Path, folder: Path) -> Path:
    """A copy that tests may write into, with MLflow's addresses for its place."""
    copy = Path(shutil.copytree(study, folder / study.name))
    check_store(copy)
    return copy


@pytest.fixture(scope="session")
def growing(dhen_search: Run) -> Path:
    """A folder with `earlier.csv` and `later.csv`, `model.yaml`, the prepared `log` of the earlier rows, and the
    `bundle` of a network whose table of users grows and has too few rows for all. Its copy `live` has learnt the
    later rows."""

    def make(folder: Path) -> None:
        earlier, later = write_two_logs(folder)
        (folder / "model.yaml").write_text(GROWING_MODEL)
        dhen_search("prepare", earlier, "--out", folder / "inferred")
        schema = (folder / "inferred" / "schema.yaml").read_text()
        assert FIXED in schema
        (folder / "log").mkdir()
        (folder / "log" / "schema.yaml").write_text(schema.replace(FIXED, GROWING))
        dhen_search("prepare", earlier, "--out", folder / "log")
        words = ("--data", folder / "log", "--out", folder / "bundle", "training.epochs=1", "--json")
        dhen_search("train", folder / "model.yaml", *words)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums are those of tests that have one thread
        dhen_search("online", folder / "bundle", "--data", later, "--out", folder / "live")
        torch.set_num_threads(threads)

    return shared("growing", make)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server, whose database holds studies of several tests, each with a name of its own."""
    with served() as server:
        yield server


@pytest.fixture
def unsynced() -> Iterator[None]:
    """Databases do not wait for the disk at each commit: what is tested is no crash of the machine."""

    def without_sync(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    sa.event.listen(sa.Engine, "connect", without_sync)
    yield
    sa.event.remove(sa.Engine, "connect", without_sync)
