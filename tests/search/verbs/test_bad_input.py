"""Bad input gets a clear error, exit code 2, no traceback; what was computed survives."""

from __future__ import annotations

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from command_line import SMALL, Run, write_log

from search.config import StudyConfig
from search.dataset import log_files
from search.execution.trainer import CHECKPOINTS
from search.log_config import DemoConfig
from search.read_study import read_study
from search.run_directory import trial_folder
from trials.records.places import PREFIX
from trials.records.trial_record import Outcome
from trials.training.checkpoint_files import INDEX, CheckpointIndex, write_manifest
from trials.training.checkpointer import STANDS, CheckpointInfo, TrainingState


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "--data", "none.csv"), "no such file"),
        (("run", "--data", "{log}", "trails=3"), "Did you mean 'trials'"),
        (("run", "--data", "{log}", "trials=null"), "needs a budget"),
        (("run", "--data", "none.csv", "minutes=.inf"), "minutes: Input should be a finite number"),
        (("run", "--data", "none.csv", "training.learning_rate=.inf"), "finite number (received inf)"),
        (("run", "--data", "none.csv", "training.train_fraction=0"), "greater than 0"),
        (
            ("run", "--data", "none.csv", "worth=0.1"),
            "0.1 could be 0.1 % or 10 %; write the sign, such as 0.1%",
        ),
        (("run", "--data", "none.csv", "worth=200%"), "worth: 200% is more than all there is"),
        (("run", "--data", "none.csv", "search_until=soon"), "Input should be 'auto' or 'none'"),
        (("run", "--data", "none.csv", "confirm=1"), "an interval needs two seeds"),
        (
            ("run", "--data", "none.csv", "demo.rows=5000"),
            "are of the built-in log, and data=none.csv is",
        ),
        (
            ("run", "--data", "none.csv", "distil=yes", "trials=3"),
            "how many networks one may have",
        ),
        (
            ("run", "--data", "none.csv", "distil=yes", "averages=3", "origins=1", "trials=3"),
            "which with origins=1 have seen what comes after them: leave one of the two out",
        ),
        (
            ("run", "--data", "none.csv", "worth=0.1%", "search_until=none"),
            "search_until=none that it does not",
        ),
        (
            ("plan", "dcn_v2", "--data", "{log}", "--cluster", "zionex", "schema.numeric=500"),
            "schema.numeric=500 and a log both say what the inputs are; leave one of the two out",
        ),
        (("run", "--data", "none.csv", "space=tyni"), "Did you mean 'tiny'"),  # before the log is read
        (("run", "--data", "none.csv", "baseline=none.yaml"), "neither a shipped model"),
        (("run", "--data", "{log}", "label=clicked"), "clicked"),
        (("run", "--data", "{log}", "trials"), "no such file"),
        (("run", "--data", "{log}", "storage=sqlite:////no/such/folder/x.db"), "cannot be used"),
        (("run", "--data", "{log}", "confirm=2", "block_by=clik"), "a categorical column of the log: site"),
        (
            ("run", "--data", "{log}", "ranks=0x2"),
            "such as 2x4, or several such shapes: 1x1,1x2 (received '0x2')",
        ),
        (("run", "--data", "{log}", "hbm=abc"), "such as 80GiB (received 'abc')"),
        (("run", "--data", "{log}", "ranks=2x2", "launcher=nowhere"), "expected local, ray"),
        (("run", "--data", "{log}", "ranks=2x2", "training.batch_size=3"), "give at least 4"),
        (("status", "nowhere"), "no study here"),
        (("verify", "nowhere"), "no bundle here"),
        (("train", "nowhere", "--data", "{log}", "--out", "b"), "no bundle, no configuration file"),
        (("train", "dcn_v2", "--data", "{log}", "--out", "b", "--from-weights"), "is no bundle"),
        (
            ("train", "dcn_v2", "--data", "{log}", "--out", "b", "epochs=3"),
            "unknown key 'epochs'. Known: columns, csv, demo, enforce_memory, format",
        ),
        (
            ("train", "dcn_v2", "--data", "none.csv", "--out", "b", "seed=abc"),
            "seed: Input should be a valid",
        ),
        (("spaces", "nothing"), "Known: beyond, default"),
        (("prepare", "none-*.csv"), "no file or folder fits this pattern"),
        (("run", "{log}", "trials=1"), "has a study.yaml. A log is given as --data"),
        (("run", "--data", "{log}", "."), "or as a pattern in quotes"),
        (("frobnicate",), "No such command"),
        (("run", "--data", "{log}", "name=20240601"), "a text that looks like a number stands in quotes"),
        (
            ("reproduce", "table2", "--data", "none.csv", "layers=2,x"),
            "layers.1: Input should be a valid integer",
        ),
        (("run", "--dta", "x"), "No such option"),
        (("run", "--rows", "3"), "No such option"),
        (("predict", "b", "--rows", "3"), "No such option"),
        (("run", "--trials", "5"), "write trials=5"),
        (("run", "--trails=5"), "write trials=5"),
        (("train", "dcn_v2", "--data", "{log}", "--out", "b", "--seed"), "write seed=VALUE"),
        (("demo", "--out", "log.csv", "--rows", "5"), "write rows=5"),
        (("demo", "--out", "log.csv", "demo.rows=5"), "rows: Input should be greater than or equal to 1000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_message_says_what_would_work(
    dhen_search: Run, click_log: Path, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    filled = [word.format(log=click_log) for word in words]
    said = dhen_search(*filled, code=2, cwd=tmp_path).stderr
    assert says in said
    assert "settings have no dashes" not in said or "write " in says, "a setting that the verb has not"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {layers: [{modules: [linear]}]}\ntraining: [1]", "training: expected a mapping"),
        ("model: {layers: [{modules: [linear]}]}\ntraining: fast", "training: expected a mapping"),
        ("model: {family: [dhen], layers: [{modules: [linear]}]}", "unknown family"),
        ("model: {layers: [{modules: [{kind: [linear]}]}]}", "unknown interaction module"),
        ("model: dcn_v2\ntrainig: {epochs: 7}", "unknown key 'trainig'. Did you mean 'training'"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ("run", "--data", "none.csv", "baseline=mine.yaml"),
        ("train", "mine.yaml", "--data", "none.csv", "--out", "b"),
        ("plan", "mine.yaml", "--data", "none.csv"),
    ],
)
def test_bad_configurations(
    dhen_search: Run, tmp_path: Path, words: tuple[str, ...], text: str, says: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    said = dhen_search(*words, code=2, cwd=tmp_path).stderr
    assert "mine.yaml: " in said
    assert says in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("click,a\n", "no rows"),
        ("x,a\n1,2\n", "label"),
        ("click,a\n" + "1,x\n0,y\n" * 40 + "1,x,extra\n", "line 82"),
    ],
)
def test_bad_logs(dhen_search: Run, tmp_path: Path, text: str, says: str) -> None:
    log = tmp_path / "bad.csv"
    log.write_text(text)
    assert says in dhen_search("prepare", log, "--out", tmp_path / "p", code=2).stderr
    assert not (tmp_path / "p" / "manifest.json").exists()


def test_a_run_directory_of_another_study(
    dhen_search: Run, study: Path, click_log: Path, tmp_path: Path
) -> None:
    before = read_study(study)
    words = ("run", "--data", click_log, "--out", study, "trials=4", *SMALL)
    said = dhen_search(*words, "seed=5", code=2).stderr
    assert "another study (seed: 0 there, 5 now)" in said
    other = write_log(tmp_path / "clicks.csv", 1000, seed=4)
    assert "with another log" in dhen_search("run", "--data", other, "--out", study, *SMALL, code=2).stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    said = dhen_search("run", "--data", click_log, "--out", tmp_path / "full", *SMALL, code=2).stderr
    assert "holds no study" in said
    assert read_study(study) == before


def test_something_named_demo_is_read_where_it_is_asked_for(
    dhen_search: Run, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    said = dhen_search("plan", "dcn_v2", "--data", "demo", code=2, cwd=tmp_path).stderr
    assert "the folder of this name here is read, not the built-in demo log" in said
    assert "demo: the folder holds no files" in said
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DHEN_SEARCH_CACHE", environment["DHEN_SEARCH_CACHE"])
    (path,) = log_files(StudyConfig().data, DemoConfig(rows=2000))
    assert path.is_file()


def test_a_database_that_is_altered_old_or_damaged_is_said_in_words(
    dhen_search: Run, study: Path, tmp_path: Path
) -> None:
    database = tmp_path / "study.db"
    shutil.copy(study / "study.yaml", tmp_path)

    def refused(verb: str, statement: str, *given: str) -> str:
        shutil.copy(study / "study.db", database)
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(statement, given)
        return dhen_search(verb, tmp_path, code=2).stderr

    for verb, key, flipped in (
        ("run", "precision", "pracision"),
        ("run", "cluster", "clustdr"),
        ("status", "sampler", "sammler"),
    ):
        changed = (f'"{key}":', f'"{flipped}":')
        said = refused(verb, "update dhen_study set facts = replace(facts, ?, ?)", *changed)
        assert str(database) in said
        assert "Restore it from a copy" in said
    for verb in ("run", "status"):
        said = refused(verb, "update dhen_alembic_version set version_num = '0004'")
        assert "before the first release: its tables have version 0004" in said
    database.write_bytes(b"no database" * 1000)
    assert "damaged" in dhen_search("run", tmp_path, code=2).stderr


def test_a_bundle_with_a_missing_or_altered_file(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    for name in ("weights.safetensors", "bundle.json", "encoding/schema.yaml"):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(study / "best", copy)
        data = bytearray((copy / name).read_bytes())
        data[-1] ^= 1
        (copy / name).write_bytes(data)
        assert f"{name} was altered" in dhen_search("verify", copy, code=2).stderr
        (copy / name).unlink()
        assert f"{name} is missing" in dhen_search("verify", copy, code=2).stderr


def test_predict_says_what_it_cannot_score(
    dhen_search: Run, study: Path, click_log: Path, tmp_path: Path
) -> None:
    prepared, log, out = tmp_path / "prepared", tmp_path / "few.csv", tmp_path / "s.csv"
    dhen_search("prepare", click_log, "--out", prepared)
    log.write_text("site,price\na,3\n")
    no_raw_rows = "is a prepared log, whose rows are encoded; name the raw files"
    for data, says in ((prepared, no_raw_rows), (log, "'user'")):
        assert says in dhen_search("predict", study / "best", "--data", data, "--out", out, code=2).stderr
        assert not out.exists()


def test_tables_over_ranks_without_torchrec(
    dhen_search: Run, click_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    words = ("run", "--data", click_log, "--out", tmp_path / "study", "trials=1", *SMALL, "ranks=1x2")
    said = dhen_search(*words, code=2).stderr
    assert "need TorchRec, which cannot be imported (there is no torchrec)" in said
    assert "pip install" in said


def test_a_checkpoint_of_another_job(dhen_search: Run, study: Path, click_log: Path, tmp_path: Path) -> None:
    """It ends the one candidate that it lies in the way of."""
    copy = tmp_path / study.name
    shutil.copytree(study, copy)
    number = len(read_study(copy).trials)
    checkpoint = trial_folder(copy, number) / CHECKPOINTS / f"{PREFIX}10"
    checkpoint.mkdir(parents=True)
    stand = CheckpointInfo(job="another", ranks=1, training=TrainingState(next_evaluation=100))
    (checkpoint / STANDS).write_text(stand.model_dump_json())
    (checkpoint / INDEX).write_text(CheckpointIndex(tensors={}, sha256={}).model_dump_json())
    write_manifest(checkpoint, {})
    dhen_search("run", "--data", click_log, "--out", copy, "trials=6", *SMALL)
    *before, failed, next_one = read_study(copy).trials
    assert failed.result.outcome is Outcome.FAILED
    assert "is a checkpoint of another job (another;" in (failed.result.error or "")
    assert next_one.result.outcome is Outcome.COMPLETED
    assert [trial.number for trial in before] == list(range(number))
