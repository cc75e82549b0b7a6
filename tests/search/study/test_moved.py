"""A run directory that was renamed, moved or copied, and a log that is found at another path."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from command_line import SMALL, Run

from search.config import StudyConfig, as_begun, write_config, written_config
from search.mlflow.store import database, local_path
from search.read_study import read_study, run_directory_of, stored_studies
from search.run_directory import STUDY_DB, database_url, study_name


def addresses(directory: Path) -> set[Path]:
    """Where MLflow looks for the files of the study's experiment and runs."""
    with sqlite3.connect(database(directory)) as connection:
        rows = connection.execute(
            "select artifact_uri from runs union select storage_location from model_versions"
        )
        return {local_path(address) for (address,) in rows}


def test_a_copy_goes_on_as_a_study_of_its_own_and_a_renamed_directory_as_the_same(
    dhen_search: Run, study: Path, tmp_path: Path
) -> None:
    before = read_study(study)
    copied, renamed = tmp_path / "copied", tmp_path / "renamed"
    shutil.copytree(study, copied)
    assert read_study(copied).replace(directory=str(study)) == before
    dhen_search("run", copied)
    created_at = read_study(copied).created_at
    assert created_at != before.created_at
    copied.rename(renamed)
    dhen_search("run", renamed)
    after = read_study(renamed)
    assert after.created_at == created_at
    assert (after.name, after.trials, after.best) == (before.name, before.trials, before.best)
    url = database_url(renamed, None)
    assert run_directory_of(url, stored_studies(url, None)[0]) == renamed
    assert all(path.is_relative_to(renamed / "artifacts") and path.exists() for path in addresses(renamed))
    assert all(path.is_relative_to(study / "artifacts") for path in addresses(study))
    for verb in ("status", "leaderboard", "report"):
        dhen_search(verb, renamed)
    dhen_search("export", renamed, "--out", tmp_path / "bundle")
    assert read_study(study) == before


def test_a_log_is_known_by_its_content(
    dhen_search: Run, study: Path, click_log: Path, tmp_path: Path
) -> None:
    out, here = tmp_path / "out", tmp_path / "here.csv"
    shutil.copytree(study, out)
    shutil.copy(click_log, here)
    words = ("--out", "out", "trials=4", *SMALL)
    dhen_search("run", "--data", "here.csv", *words, cwd=tmp_path)
    assert written_config(out).data == (str(here),)
    here.unlink()
    for words in (("run", out), ("export", out, "--out", tmp_path / "bundle")):
        said = dhen_search(*words, code=2).stderr
        assert f"{here}: no such file" in said
        assert f"`dhen-search run {out} --data PATH`" in said
    dhen_search("run", out, "--data", click_log)
    assert read_study(out).trials == read_study(study).trials
    said = dhen_search("run", out, "--out", study, code=2).stderr
    assert "leave one out" in said


@pytest.mark.parametrize("lost", ["missing", "empty"])
def test_results_without_their_database_are_not_begun_anew(
    dhen_search: Run, study: Path, tmp_path: Path, lost: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(study, out)
    (out / STUDY_DB).unlink()
    if lost == "empty":
        (out / STUDY_DB).touch()
    files = {path: path.read_bytes() for path in (out / "report.html", out / "best" / "bundle.json")}
    for words in (("status", out), ("report", out), ("run", out), ("run", out), ("status", out)):
        said = dhen_search(*words, code=2).stderr
        assert "is lost or empty" in said
        assert f"{out / 'best'} still works" in said
    assert {path: path.read_bytes() for path in files} == files


def test_two_run_directories_do_not_share_a_study_of_one_database(
    dhen_search: Run, study: Path, click_log: Path, tmp_path: Path
) -> None:
    before = read_study(study)
    words = ("run", "--data", click_log, "--out", tmp_path / "other", "trials=4", *SMALL)
    said = dhen_search(*words, "name=study", f"storage={database_url(study, None)}", code=2).stderr
    assert f"lies in {study}: go on there" in said
    assert read_study(study) == before


def test_in_a_database_of_others_a_study_keeps_its_name(tmp_path: Path) -> None:
    begun, renamed = tmp_path / "begun", tmp_path / "renamed"
    begun.mkdir()
    config = StudyConfig(
        storage="postgresql://host/studies", schema_file=__file__, data=("a.csv", "s3://b/c")
    )
    begun_config = as_begun(config, begun)
    assert begun_config.name == "begun"
    assert begun_config.data == (str(Path("a.csv").absolute()), "s3://b/c")
    write_config(begun, begun_config)
    begun.rename(renamed)
    assert as_begun(config, renamed).name == study_name(renamed, written_config(renamed).name) == "begun"
