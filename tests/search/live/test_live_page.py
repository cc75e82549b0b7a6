"""The page of a study that is written to while a browser looks at it, through the real ledger and event files."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from chromium import Chromium
from click.testing import CliRunner
from command_line import end_ui, read_until, start_ui
from tools import needs
from warm_process import WarmProcess

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from search.live.study_page import StudyPage
from search.mlflow.store import artifacts, local_path, open_client, store_uri
from search.read_study import HEAD, ledger_of, read_study
from search.run_directory import only_driver, trial_folder
from search.verbs.ui import _open, _place, command
from trials.records.events import EVENTS, EvaluationEvent, EventWriter, Progress
from trials.records.trial_record import Outcome, TrialRecord
from trials.store.ledger import Ledger, StudySetting

REMARK = "the loss was nan at step 4242"
TOKEN = "correct horse battery"


def setting(directory: object, facts: dict[str, Any]) -> StudySetting:
    log, cluster = facts["log"], facts["cluster"]
    return StudySetting(directory=str(directory), log=log, features={}, seed=0, version=0, cluster=cluster)


class Driver:
    """Writes to a copy of a finished study as a driver of it would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ledger = Ledger(*ledger_of(directory))
        facts = self._ledger.facts()
        self._ledger.change_facts(lambda _: facts | {HEAD: facts[HEAD] | {"finished": False}})
        self._ledger.settle(setting(directory, facts))
        trials = read_study(directory).trials
        self._like = next(trial for trial in trials if trial.result.curve)
        self.number = len(trials)

    def begin(self) -> None:
        trial_folder(self.directory, self.number).mkdir(parents=True)
        self._save(self._like.with_result(outcome=Outcome.RUNNING, curve=(), validation=None, test=None))

    def say(self, event: Progress | EvaluationEvent) -> None:
        with EventWriter(trial_folder(self.directory, self.number) / EVENTS) as write:
            write(event)

    def evaluate(self) -> None:
        self.say(EvaluationEvent(point=self._like.result.curve[0]))

    def end(self) -> None:
        self._save(self._like.with_result(outcome=Outcome.DIVERGED, error=REMARK, validation=None, test=None))

    def _save(self, trial: TrialRecord) -> None:
        self._ledger.save(trial.replace(number=self.number))


@pytest.fixture
def driver(study: Path, tmp_path: Path) -> Iterator[Driver]:
    copy = Path(shutil.copytree(study, tmp_path / "runs" / study.name))
    with only_driver(copy):
        yield Driver(copy)


@contextmanager
def served(*words: object) -> Iterator[tuple[WarmProcess, str]]:
    """The command, with a token that `get` shows, and the address of the page that it printed."""
    process = start_ui(*words, "--token", TOKEN)
    try:
        said = read_until(process, "the study, as it goes on")
        yield process, re.search(r"http://\S+", said)[0]
    finally:
        end_ui(process)


def get(address: str, data: bytes | None = None, **headers: str) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} | headers
    try:
        with build_opener(ProxyHandler({})).open(Request(address, data, headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


@needs("chromium")
def test_a_trial_appears_while_the_page_is_open(driver: Driver, tmp_path: Path) -> None:
    database = driver.directory / "study.db"
    away = database.rename(tmp_path / "study.db")
    with served(driver.directory) as (_, page), Chromium(tmp_path / "profile") as browser:
        browser.open(page)
        browser.wait_for("document.body?.textContent.includes('database with their results is lost')")
        away.rename(database)
        browser.wait_for("document.getElementById('study-trains')?.textContent === 'live'")
        assert REMARK not in browser.evaluate("document.body.textContent")
        driver.begin()
        driver.say(Progress(examples=430, total_examples=1000, seconds=2.0))
        words = f"trial {driver.number} trains: 43 % of its passes at most, 215 examples/s"
        browser.wait_for(f"document.getElementById('study-trains')?.textContent.includes({words!r})")
        driver.end()
        browser.wait_for(f"document.body?.textContent.includes({REMARK!r})")
        browser.screenshot(tmp_path / "live.png")


@pytest.fixture
def page_of(driver: Driver) -> StudyPage:
    return StudyPage("/study", driver.directory)


def changes(page: StudyPage, do: Callable[[], None]) -> bool:
    """Whether the version is another one afterwards."""
    before = page.state()["version"]
    time.sleep(0.01)  # a file system's clock may tick no faster
    do()
    return bool(page.state()["version"] != before)


def test_the_version_changes_with_what_the_page_shows(driver: Driver, page_of: StudyPage) -> None:
    assert not changes(page_of, lambda: None)
    assert changes(page_of, driver.begin)
    progress = Progress(examples=10, total_examples=20, seconds=1.0)
    assert not changes(page_of, lambda: driver.say(progress))
    (training,) = page_of.state()["training"]
    assert (training["trial"], training["examples"]) == (driver.number, 10)
    assert changes(page_of, driver.evaluate)
    (driver.directory / "trials" / f"{driver.number:05d}" / EVENTS).unlink()  # another attempt begins
    driver.say(Progress(examples=2, total_examples=20, seconds=1.0))
    page_of.state()
    assert page_of.state()["training"][0]["examples"] == 2
    assert changes(page_of, driver.end)
    assert page_of.state()["training"] == []


def test_a_page_is_rendered_once_and_at_most_a_tenth_of_the_time(driver: Driver, page_of: StudyPage) -> None:
    first, version = page_of.html()
    assert f'<meta name="study-live" content="/study/state" data-version="{version}">' in first
    driver.begin()
    driver.end()
    assert page_of.html() == (first, version), "the pause after a rendering is not over"
    page_of._due = 0.0
    later, other = page_of.html()
    assert other != version
    assert REMARK in later
    assert REMARK not in first


def test_everybody_needs_the_token_and_a_killed_command_leaves_nothing(study: Path) -> None:
    """Other sites are refused; the others here are served to this machine alone."""
    process = start_ui(study, "--host", "0.0.0.0", "--token", TOKEN)
    said = read_until(process, "MLflow answers")
    assert f"MLFLOW_TRACKING_TOKEN={TOKEN}" in said
    port = int(re.search(r":(\d+)/", said)[1])
    base = f"http://127.0.0.1:{port}"
    mlflow = "/api/2.0/mlflow/experiments/get?experiment_id=1"
    for path in ("/study", "/study/state", "/", mlflow, "/health"):
        code, text = get(base + path, Authorization="")
        assert code == 401, path
        assert study.name not in text
        assert get(base + path, Authorization="Bearer correct horse")[0] == 401
        assert get(base + path)[0] == 200, path
    assert get(f"{base}/study?token=wrong", Authorization="")[0] == 401
    state = f"{base}/study/state"
    assert get(state, Host="evil.example")[0] == 403
    assert get(state, Host="localhost:9000")[0] == 200, "a tunnel has another port"
    assert get(state, Origin="http://evil.example")[0] == 403
    assert get(state, Origin=base)[0] == 200
    process.kill()
    process.communicate(60)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_mlflow_serves_and_writes_files_of_the_study_alone(tmp_path: Path) -> None:
    """Also where the store names another place already, and by links and uploads."""
    secret, elsewhere, run_folder = tmp_path / "secret", tmp_path / "elsewhere", tmp_path / "run"
    secret.write_text("private")
    elsewhere.mkdir()
    client = open_client(store_uri(run_folder))
    own, foreign = (
        client.create_run(client.create_experiment(folder.name, folder.as_uri())).info
        for folder in (artifacts(run_folder), elsewhere)
    )
    client.log_text(own.run_id, "its own", "note.txt")
    local_path(foreign.artifact_uri).mkdir(parents=True)
    (local_path(own.artifact_uri) / "link").symlink_to(secret)
    (local_path(foreign.artifact_uri) / "link").symlink_to(secret)
    with served(run_folder) as (process, printed):
        read_until(process, "MLflow answers")
        base = printed.partition("/study")[0]
        files, experiments = (
            f"{base}/{name}" for name in ("get-artifact", "api/2.0/mlflow/experiments/create")
        )
        assert get(f"{files}?run_id={own.run_id}&path=note.txt") == (200, "its own")
        assert get(f"{files}?run_id={own.run_id}&path=link")[0] >= 400
        assert get(f"{files}?run_id={foreign.run_id}&path=link")[0] == 403
        upload = f"{base}/ajax-api/2.0/mlflow/upload-artifact?path=link&run_uuid="
        assert get(upload + foreign.run_id, b"{}")[0] == 403
        assert get(upload + own.run_id, b"{}")[0] >= 400
        for place in (elsewhere.as_uri(), str(elsewhere), "s3://bucket/files"):
            code, text = get(experiments, json.dumps({"name": "x", "artifact_location": place}).encode())
            assert (code, "only files below" in text) == (403, True)
        assert get(experiments, b'{"name": "y"}')[0] == 200
    assert secret.read_text() == "private"


@needs("chromium")
def test_the_printed_address_lets_a_browser_in_and_forgets_the_token(study: Path, tmp_path: Path) -> None:
    with served(study) as (_, printed), Chromium(tmp_path / "profile") as browser:
        assert "token=" in printed
        bare = printed.partition("?")[0]
        browser.open(bare)
        browser.wait_for("document.body?.innerText.includes('needs its token')")
        browser.open(printed)
        browser.wait_for(f"document.body?.textContent.includes({study.name!r})")
        assert browser.evaluate("location.href") == bare
        assert browser.evaluate("document.cookie") == "", "a script could read the token"
        mlflow = bare.removesuffix("study")
        browser.open(mlflow)
        browser.wait_for("document.title === 'MLflow'")


def test_a_study_by_its_database_has_its_page_alone(driver: Driver, tmp_path: Path) -> None:
    """As on another machine, where there is neither run directory nor MLflow."""
    database = shutil.copy(driver.directory / "study.db", tmp_path / "elsewhere.db")
    shutil.move(driver.directory, tmp_path / "away")
    with served("--study", f"sqlite:///{database}") as (process, page):
        assert "no store of the study on this machine" in read_until(process, "MLflow")
        page = page.partition("?")[0]
        code, text = get(page)
        assert code == 200
        assert get(page, Authorization="")[0] == 401
        assert "MLflow" not in get(f"{page}/state")[1]
        assert driver.directory.name in text
        assert get(page.removesuffix("/study") + "/")[1] == text, "the root leads to the page"


def test_several_studies_of_a_database_are_listed(driver: Driver, tmp_path: Path) -> None:
    database = tmp_path / "two.db"
    shutil.copy(driver.directory / "study.db", database)
    second = Ledger(f"sqlite:///{database}", "one/more & <b>")
    first = Ledger(*ledger_of(driver.directory))
    facts = first.facts()
    second.settle(setting("/nowhere", facts))
    second.change_facts(lambda _: facts | {HEAD: facts[HEAD] | {"name": "one/more & <b>"}})
    for trial in first.trials():
        second.save(trial)
    with served("--study", f"sqlite:///{database}") as (_, page):
        page = page.partition("?")[0]
        listed = get(page)[1]
        links = re.findall(r'href="([^"]+)"', listed)
        assert len(links) == 2
        assert "<b>" not in listed
        for link in links:
            address = page.removesuffix("/study") + link
            assert get(address)[0] == 200
            assert json.loads(get(f"{address}/state")[1])["problem"] is None
        assert get(f"{page}/no-such")[0] == 404
    with pytest.raises(UserError, match="it has"):
        ui("--study", f"sqlite:///{database}", "--name", "ads")


def ui(*words: str) -> None:
    CliRunner().invoke(command, list(words), catch_exceptions=False)


def test_a_study_that_has_not_begun_is_said_and_appears(driver: Driver, tmp_path: Path) -> None:
    directory = tmp_path / "new"
    directory.mkdir()
    shutil.copy(driver.directory / "study.yaml", directory)
    page = StudyPage("/study", directory)
    text, version = page.html()
    assert "has not started a trial yet" in text
    assert (version, page.state()["version"]) == ("", "")
    assert '<meta name="study-live" content="/study/state" data-version="">' in text
    shutil.copy(driver.directory / "study.db", directory)
    (directory / "study.yaml").write_text(f"name: {driver.directory.name}\n")
    assert page.state()["problem"] is None
    assert page.state()["version"] != ""
    assert "has not started" not in page.html()[0]


def test_a_study_that_a_driver_prepares_has_a_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to browse"):
        _place(tmp_path, None, None)
    with only_driver(tmp_path):
        _place(tmp_path, None, None)
        page = StudyPage("/study", tmp_path)
        assert "a study begins here" in page.html()[0]
        assert page.state()["version"] == ""


def test_a_study_of_another_version_is_said(driver: Driver) -> None:
    ledger = Ledger(*ledger_of(driver.directory))
    facts = ledger.facts()
    ledger.change_facts(lambda _: facts | {HEAD: facts[HEAD] | {"of_tomorrow": 1}})
    text, _ = StudyPage("/study", driver.directory).html()
    assert "another version of dhen-search" in text
    with pytest.raises(UserError, match="another version"):
        read_study(driver.directory)


def test_a_directory_that_goes_away_is_said_and_the_page_stays(driver: Driver, page_of: StudyPage) -> None:
    """Also one of which all but the ledger is gone is shown."""
    driver.begin()
    for folder in ("trials", "artifacts", "best"):
        shutil.rmtree(driver.directory / folder, ignore_errors=True)
    (driver.directory / "mlflow.db").unlink()
    text, version = page_of.html()
    assert driver.directory.name in text
    assert page_of.state()["problem"] is None
    page_of._due = 0.0
    shutil.rmtree(driver.directory)
    state = page_of.state()
    assert "no study here" in state["problem"]
    assert state["version"] == version


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "192.0.2.1"), "cannot listen on 192"),
        (("--host", "0.0.0.0", "--token", "secret"), "can be guessed"),
        (("--host", "0.0.0.0", "--no-token"), r"--host 0.0.0.0 lets other machines in: leave one"),
        (("--no-token", "--token", TOKEN), r"--token or .* gives one: leave one"),
    ],
)
def test_hosts_and_tokens_that_cannot_be(study: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ui(str(study), *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--study with the URL"),
        (("here", "--study", "sqlite:///x.db"), "--study with the URL"),
        (("--study", "nonsense"), "SQLAlchemy URL"),
        (("--study", "sqlite:////none/study.db"), "cannot be used"),
        (("--study", "sqlite:///{folder}/text.db"), "cannot be used"),
        (("--study", "sqlite:///{folder}/empty.db"), "no study that has trained"),
        (("--study", "mysql://x/y"), "install the driver|of the kind"),
        ((".", "--name", "ads"), "--name names a study of a database"),
    ],
)
def test_what_cannot_be_shown_is_the_users_mistake(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    Ledger(f"sqlite:///{tmp_path / 'empty.db'}", "x").close()
    write_atomically(tmp_path / "text.db", "no database " * 50)
    with pytest.raises(UserError, match=said):
        ui(*(word.format(folder=tmp_path) for word in words))


def test_an_opened_browser_gets_the_token_from_a_file_of_its_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    _open(f"http://127.0.0.1/study?token={TOKEN}")
    (file,) = tmp_path.iterdir()
    assert opened == [file.as_uri()]
    assert f"token={TOKEN}" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
