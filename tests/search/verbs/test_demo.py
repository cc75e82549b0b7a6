"""`demo` writes generated logs that other commands read, and `demo.KEY` of a study names the same logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_line import Run

from search.config import StudyConfig
from search.dataset import log_files
from search.log_config import REMOVED_OF_DEMO, DemoConfig
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog

SETTINGS = ("rows=3000", "users=40", "items=20", "affinity=0.5")


def test_every_format_is_read_as_the_same_log(dhen_search: Run, tmp_path: Path) -> None:
    def prepared(name: str) -> PreparedLog:
        said = dhen_search("demo", "--out", tmp_path / name, *SETTINGS).stdout
        assert f"3,000 generated rows: {tmp_path / name}" in said
        return prepare([tmp_path / name], out=tmp_path / f"prepared-{name}")

    table = prepared("log.parquet")
    assert table.schema.oracle == "oracle_probability"
    assert {"user", "item", "M1", "M2"} <= set(table.schema.tables)
    files = [path.relative_to(table.directory) for path in table.directory.rglob("*.npy")]
    assert files
    for name in ("log.csv", "log.tsv", "log.csv.gz"):
        text = prepared(name)
        for file in files:
            arrays = (np.load(each.directory / file) for each in (text, table))
            np.testing.assert_array_equal(*arrays, err_msg=f"{name} {file}")


def test_a_study_names_the_log_with_the_same_words(dhen_search: Run, tmp_path: Path) -> None:
    dhen_search("demo", "--out", tmp_path / "log.parquet", *SETTINGS)
    (with_users,) = log_files(["demo"], DemoConfig(rows=3000, users=40, items=20, affinity=0.5))
    (plain,) = log_files(["demo"], DemoConfig(rows=3000))
    assert pq.read_table(with_users).equals(pq.read_table(tmp_path / "log.parquet"))
    assert plain.name == "demo-3000-0.parquet"
    assert "user" not in pq.read_schema(plain).names


@pytest.mark.parametrize(
    ("out", "words", "message"),
    [
        ("log.xls", (), "the name ends in no format that is written; end it in .parquet, .csv"),
        ("there.csv", (), "there.csv exists and isn't marked as a demo log, so it is left alone"),
        ("log.csv", ("affinity=0.5",), "affinity is about users and items"),
        ("log.csv", ("user=5",), "Did you mean 'users'"),
        ("log.csv", ("rows",), "not of the form key=value"),
    ],
)
def test_mistakes_are_explained(
    dhen_search: Run, out: str, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "there.csv").write_text("mine\n")
    assert message in dhen_search("demo", "--out", tmp_path / out, *words, code=2).stderr
    assert (tmp_path / "there.csv").read_text() == "mine\n"
    assert not (tmp_path / "log.csv").exists()


@pytest.mark.parametrize("key", REMOVED_OF_DEMO)
def test_a_removed_key_is_answered_by_what_decides_now(dhen_search: Run, tmp_path: Path, key: str) -> None:
    default, decides = REMOVED_OF_DEMO[key]
    for words in (
        ("demo", "--out", tmp_path / "log.csv", f"{key}=7"),
        ("run", "--out", tmp_path, f"demo.{key}=7"),
    ):
        said = " ".join(dhen_search(*words, code=2).stderr.split())
        assert f"the key '{key}' was removed: {decides}" in said
    assert StudyConfig.model_validate({"demo": {key: default}}) == StudyConfig()
