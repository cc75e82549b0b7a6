"""Keys that say how a log is read: the official split of a public set by one command; `plan` and `train` too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, Run, write_log

from search.bundles.bundle import read_bundle

QUICK = ("training.epochs=1", "training.batch_size=64")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log whose label nothing tells by its name, with one row that cannot be read."""
    rng = random.Random(0)
    rows = [f"s{rng.randrange(9)},{rng.random():.3f},{rng.randrange(2)}" for _ in range(400)]
    path = tmp_path_factory.mktemp("shop") / "shop.csv"
    path.write_text("\n".join(("site,price,purchased", *rows[:200], "s1,0.5", *rows[200:])) + "\n")
    return path


def test_plan_reads_a_log_as_a_study_does(dhen_search: Run, shop: Path) -> None:
    words = ("plan", "dcn_v2", "--data", shop, "--cluster", "h100", "--ranks", "1x1", *QUICK)
    assert "label=" in dhen_search(*words, "skip_bad_rows=yes", code=2).stderr
    assert "line 202" in dhen_search(*words, "label=purchased", code=2).stderr
    found = dhen_search(*words, "label=purchased", "skip_bad_rows=yes", "--json").stdout
    assert json.loads(found)[0]["chosen"] == "dp"
    alone = ("plan", "dcn_v2", "--cluster", "h100", "label=purchased")
    assert "label says how a log is read; name one with --data" in dhen_search(*alone, code=2).stderr


def test_train_reads_a_log_as_a_study_does(dhen_search: Run, shop: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    reading: tuple[Any, ...] = ("--data", shop, "skip_bad_rows=yes")
    words = ("label=purchased", "split.validation=0.3", "split.test=0.2")
    dhen_search("train", "dcn_v2", *reading, "--out", bundle, *QUICK, *words)
    assert read_bundle(bundle).info.log.rows == {"train": 200, "validation": 120, "test": 80}

    again = ("train", bundle, *reading, "--out", tmp_path / "again", *QUICK)
    dhen_search(*again)
    assert read_bundle(tmp_path / "again").info.log == read_bundle(bundle).info.log
    dhen_search("train", bundle, *reading, "--out", tmp_path / "later", "--from-weights", *QUICK)
    refused = dhen_search(*again, "--from-weights", "growing={capacity: 5, columns: [site]}", code=2)
    assert "growing.capacity=5 is less than the 10 rows of site" in refused.stderr
    refused = dhen_search(*again, "--from-weights", "schema_file=mine.yaml", code=2)
    assert "schema_file: the log is read as the bundle has it" in refused.stderr
    assert "schema_file: the log" in dhen_search(*again, "schema_file=mine.yaml", code=2).stderr


def test_a_split_that_cannot_be_is_said(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    new = ("run", "--data", click_log, "--out", tmp_path / "no", *SMALL)
    assert "give one of them: split.by, split.validation" in dhen_search(*new, "split=0.2", code=2).stderr
    assert "(received 1.5, 0.1)" in dhen_search(*new, "split.validation=1.5", code=2).stderr
    assert "Did you mean 'split.test'" in dhen_search(*new, "split.tests=[test.csv]", code=2).stderr
    dhen_search("prepare", click_log, "--out", tmp_path / "prepared")
    prepared = ("run", "--data", tmp_path / "prepared", "--out", tmp_path / "no", *SMALL)
    assert "prepared already" in dhen_search(*prepared, "split.validation=0.2", code=2).stderr


def test_a_check_says_how_each_column_is_read_and_writes_nothing(dhen_search: Run, tmp_path: Path) -> None:
    rng = random.Random(2)
    clicks = [int(rng.random() < 0.3) for _ in range(400)]
    log, rows = (
        tmp_path / "log.csv",
        [f"s{n % 7},{rng.randrange(9, 90) * click},{click}" for n, click in enumerate(clicks)],
    )
    log.write_text("\n".join(("site,dwell_ms,click", *rows)) + "\n")
    said = dhen_search("prepare", log, "--check", "columns.site=ignore", "columns.dwell_ms=numeric").stdout
    assert [line.split()[:2] for line in said.splitlines()[1:4]] == [
        ["site", "ignore"],
        ["dwell_ms", "numeric"],
        ["click", "label"],
    ]
    checked = json.loads(dhen_search("prepare", log, "--check", "--json").stdout)
    assert [(column["name"], column["role"]) for column in checked["columns"]][1] == ("dwell_ms", "ignore")
    assert checked["notes"][0].startswith("left out, since they are known only after the label: 'dwell_ms'")
    assert checked["directory"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
    mistyped = dhen_search("prepare", log, "colums.site=ignore", code=2).stderr
    assert "unknown key 'colums'. Did you mean 'columns'" in mistyped
    assert "leave --out" in dhen_search("prepare", log, "--check", "--out", tmp_path / "x", code=2).stderr


def test_a_file_without_header_needs_a_word(dhen_search: Run, tmp_path: Path) -> None:
    path = tmp_path / "access.csv"
    path.write_text("".join(f"{i % 7},{i * i},{i % 5},{i % 2}\n" for i in range(300)))
    asked = dhen_search("prepare", path, "--out", tmp_path / "log", code=2).stderr
    assert "csv.header=no label=c3\n      'c0': 0, 1, 2; 'c1': 0, 1, 4" in asked
    words = ("csv.header=no", "label=c3")
    assert "read with no header" in dhen_search("prepare", path, *words, "--out", tmp_path / "log").stdout
    text = (tmp_path / "log" / "schema.yaml").read_text()
    assert "csv: {header: false}" in text
    dhen_search("prepare", path, "--out", tmp_path / "log")  # by its own schema.yaml
    assert (tmp_path / "log" / "schema.yaml").read_text() == text


def test_a_log_that_was_prepared_for_another_bundle_is_refused(
    dhen_search: Run, study: Path, tmp_path: Path
) -> None:
    """The ids of such a log name other rows of the tables."""
    other = write_log(tmp_path / "other.csv", 3000, seed=7)
    dhen_search("prepare", other, "--out", tmp_path / "prepared")
    for words in (("verify", study / "best"), ("slices", study / "best", "--column", "site")):
        said = dhen_search(*words, "--data", tmp_path / "prepared", code=2).stderr
        assert "was prepared in another encoding than that of" in " ".join(said.split())
    assert "another one" in dhen_search("verify", study / "best", "--data", other).stdout
