"""A study whose runs go to a tracking server that is killed and comes back; servers that refuse or are slow."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, free_port, start, wait_for_trials
from records import study as made_up
from rich.console import Console

from dhen.errors import UserError
from search.config import StudyConfig, written_config
from search.mlflow.fill_in import StudyRuns
from search.mlflow.store import VARIABLE, database, local_path, open_client, with_destination
from search.read_study import read_study
from trials.records.study_record import StudyRecord

Serve = Callable[..., AbstractContextManager[str]]


def runs(server: str, experiment: str) -> list[Any]:
    client = open_client(server)
    identity = client.get_experiment_by_name(experiment).experiment_id
    return list(client.search_runs([identity], max_results=1000))


def test_a_server_that_is_killed_and_comes_back_misses_nothing(
    dhen_search: Run,
    click_log: Path,
    environment: dict[str, str],
    tmp_path: Path,
    tracking_server: Serve,
) -> None:
    out, part, whole = tmp_path / "ads", made_up(3, finished=False), made_up(5)
    said, port = io.StringIO(), free_port()
    with ExitStack() as until_killed:
        server = until_killed.enter_context(tracking_server(tmp_path, port))
        config = StudyConfig(tracking=server)
        follower = StudyRuns(tmp_path / "made-up", config, Console(file=said, width=400))
        assert follower.follow(part)
        process = start(click_log, out, environment | {VARIABLE: server}, "trials=2")
        wait_for_trials(out, 1)
    for _ in range(2):  # away: said once
        assert not follower.follow(whole, at_once=True)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert output.count("MLflow is behind") == 1
    assert "does not answer. The study goes on" in " ".join(output.split())
    assert written_config(out).tracking == server
    assert not database(out).exists()
    late = dhen_search("report", out)
    assert "MLflow is behind" in late.stdout

    with tracking_server(tmp_path, port):
        assert follower.follow(whole, at_once=True)
        assert len(runs(server, "ads-march")) == 1 + len(whole.trials)
        assert f"MLflow: {server} is up to date" in dhen_search("report", out).stdout
        record = read_study(out)
        numbers = [run.data.tags.get("trial.number") for run in runs(server, "ads")]
        assert sorted(filter(None, numbers)) == [str(trial.number) for trial in record.trials]
        client = open_client(server)
        assert client.get_model_version_by_alias("ads", "best").run_id in [
            run.info.run_id
            for run in runs(server, "ads")
            if run.data.tags.get("trial.number") == str(record.best)
        ]
        # another study of the same name is kept apart
        again = made_up(2, seed=5, name="ads")
        assert StudyRuns(tmp_path / "b", config, Console(file=said)).follow(again)
        assert len(runs(server, "ads")) == 1 + len(record.trials)
        assert len(client.search_experiments(filter_string="name LIKE 'ads %'")) == 1
    assert said.getvalue().count("MLflow is behind") == 1
    assert said.getvalue().count("MLflow is up to date again") == 1


@contextmanager
def answering(status: int, *, after_seconds: float = 0.0) -> Iterator[str]:
    """A server that answers every request with a status and a secret."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(after_seconds)
            with suppress(BrokenPipeError):  # who asked has given up, as it is meant to
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"the token was tok-3n")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "does not know who asks (401): set MLFLOW_TRACKING_USERNAME"),
        (403, "refuses (403)"),
        (404, "nothing of an MLflow tracking server is found there"),
    ],
)
def test_a_server_that_refuses_is_told_without_its_words(
    status: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = io.StringIO()
    with answering(status) as server, caplog.at_level("DEBUG", "search.mlflow"):
        follower = StudyRuns(tmp_path, StudyConfig(tracking=server), Console(file=said, width=400))
        for _ in range(2):
            assert not follower.follow(made_up(2), at_once=True)
    assert said.getvalue().count(told) == 1
    assert "tok-3n" not in said.getvalue() + caplog.text
    assert f"status {status}" in caplog.text


def test_a_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may shorten the wait; MLflow's own minutes are never waited."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    said = io.StringIO()
    with answering(200, after_seconds=1.5) as server:
        follower = StudyRuns(tmp_path, StudyConfig(tracking=server), Console(file=said, width=400))
        assert not follower.follow(made_up(2))
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
    assert "does not answer" in said.getvalue()


def test_where_runs_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)

    def goes_to(given: str) -> str | None:
        monkeypatch.setenv(VARIABLE, given)
        return with_destination(StudyConfig(), tmp_path / "run").tracking

    web = "http://tracking.example:5000"
    assert goes_to(f"{web}/") == web
    for own in ("https://other.example", "local"):
        assert with_destination(StudyConfig(tracking=own), tmp_path).tracking == own
    databases = ("mysql+pymysql://ada@db/runs", "mssql+pyodbc://ada@dsn")
    for taken in ("databricks", "databricks://profile", *databases):
        assert goes_to(taken) == taken
    assert goes_to("sqlite:///runs.db") == f"sqlite:///{tmp_path}/runs.db"
    assert goes_to("sqlite:///run/mlflow.db") is None  # the study's own store
    assert goes_to("http://ada:s3cret@tracking.example") == "http://tracking.example"
    assert goes_to("postgresql://ada:s3/cret@db/runs?sslmode=require&password=s3cret") == (
        "postgresql://ada@db/runs?sslmode=require"
    )
    for no_place in (
        "uc",
        "ftp://tracking.example",
        "tracking:5000",
        "postgresql://db:port/runs",
        "sqlite://",
    ):
        expected = f"{VARIABLE}={no_place}: expected an address at which MLflow keeps"
        with pytest.raises(UserError, match=expected):
            goes_to(no_place)
    assert goes_to(f"{web}?a=1&token=s3cret") == f"{web}?a=1"
    for secret in ("http://ada:s3cret@tracking.example", "mysql://ada:s3cret@db/runs", f"{web}?token=s3cret"):
        with pytest.raises(UserError, match=f"this address in {VARIABLE}") as error:
            with_destination(StudyConfig(tracking=secret), tmp_path)
        assert "s3cret" not in str(error.value)
    for folder in ("mlruns", "file:mlruns", (tmp_path / "mlruns").as_uri()):
        with pytest.raises(UserError, match=f"sqlite:///{tmp_path}/mlruns/mlflow.db, or set MLFLOW_ALLOW"):
            goes_to(folder)
        with monkeypatch.context() as allowed:
            allowed.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
            assert goes_to(folder) == (tmp_path / "mlruns").as_uri()


@pytest.mark.parametrize("place", ["sqlite:///runs.db", "mlruns"])
def test_a_database_or_a_folder_has_the_runs_of_all_studies(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv(VARIABLE, place)
    said = io.StringIO()
    for name in "ab":
        record = made_up(1, name=name)
        config = with_destination(StudyConfig(), tmp_path / name)
        follower = StudyRuns(tmp_path / name, config, Console(file=said, width=400))
        assert follower.follow(record), said.getvalue()
        written = 1 + len(record.trials) + len(record.retrainings)
        assert len(runs(str(config.tracking), name)) == written
        if place != "mlruns":  # files lie with the study, and not in the working directory
            assert (tmp_path / name / "artifacts").is_dir()
            assert not (tmp_path / "mlruns").exists()


def test_a_database_elsewhere_takes_addresses_along_if_the_files_were_moved(tmp_path: Path) -> None:
    config = StudyConfig(tracking=f"sqlite:///{tmp_path}/runs.db")

    def synced(directory: Path, record: StudyRecord) -> str:
        said = io.StringIO()
        assert StudyRuns(directory, config, Console(file=said)).follow(record), said.getvalue()
        return said.getvalue()

    def places(name: str) -> set[Path]:
        """Where MLflow looks for the files of an experiment and its runs."""
        client = open_client(str(config.tracking))
        experiment = client.get_experiment_by_name(name)
        found = client.search_runs([experiment.experiment_id])
        addresses = (experiment.artifact_location, *(run.info.artifact_uri for run in found))
        return {path for path in map(local_path, addresses) if path.exists() and "artifacts" in path.parts}

    record, other = made_up(1, name="ads"), made_up(1, name="other")
    before, after = tmp_path / "be_fore", tmp_path / "after"
    synced(before, record)
    names = {path.relative_to(before) for path in places("ads")}
    shutil.copytree(before, after)
    synced(after, record)  # of a copy nothing is changed
    assert places("ads") == {before / name for name in names}
    shutil.rmtree(after)
    before.rename(after)
    synced(before, other)  # another study where the first has been
    others = places("other")
    synced(after, record)
    assert places("ads") == {after / name for name in names}
    assert places("other") == others != set()


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("databricks", "DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile of"),
        (
            "postgresql://ada@127.0.0.1:1/runs",
            "the database postgresql://ada@127.0.0.1:1/runs cannot be used",
        ),
    ],
)
def test_what_cannot_be_reached_is_told_at_once(
    uri: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, uri.replace("ada@", "ada:s3cret@"))
    said = io.StringIO()
    config = with_destination(StudyConfig(), tmp_path)
    assert not StudyRuns(tmp_path, config, Console(file=said, width=800)).follow(made_up(1))
    assert told in said.getvalue()
    assert "s3cret" not in said.getvalue()
    assert len(said.getvalue().splitlines()) == 1
