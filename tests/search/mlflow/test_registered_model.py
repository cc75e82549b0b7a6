"""The best of a study as a registered model, and served by MLflow's own server: raw rows in, probabilities out."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from command_line import Run, free_port

from search.bundles.bundle import read_bundle
from search.mlflow.model import requirements
from search.mlflow.store import open_client, store_uri

ROWS = 40


def client(study: Path) -> Any:
    return open_client(store_uri(study))


def raw_rows(log: Path) -> list[dict[str, Any]]:
    """The log's first rows as JSON would have them: numbers are numbers, what is missing is null."""
    with log.open(newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(ROWS), strict=False)]
    numbers = ("price", "visits")
    return [
        {name: None if not text else float(text) if name in numbers else text for name, text in row.items()}
        for row in rows
    ]


def test_mlflow_serves_what_predict_writes(
    dhen_search: Run,
    study: Path,
    click_log: Path,
    tmp_path: Path,
    model_server: Callable[..., AbstractContextManager[str]],
    post: Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]],
) -> None:
    dhen_search("predict", study / "best", "--data", click_log, "--out", tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open(newline="") as file:
        expected = [float(row["score"]) for row, _ in zip(csv.DictReader(file), range(ROWS), strict=False)]
    rows = raw_rows(click_log)
    assert any(value is None for row in rows for value in row.values())
    columns = list(rows[0])
    split = {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}
    without = [{name: value for name, value in rows[0].items() if name != "site"}]
    with model_server("models:/study@best", store_uri(study), free_port()) as address:
        answers = [post(address, {"dataframe_records": rows}), post(address, {"dataframe_split": split})]
        nothing = post(address, {"dataframe_records": [dict.fromkeys(columns)]})
        lacking = post(address, {"dataframe_records": without})
        wrong = post(address, {"dataframe_records": [rows[0] | {"tags": ["x"], "site": {"a": 1}}]})
    for status, answer in answers:
        assert status == 200, answer
        assert answer["predictions"] == pytest.approx(expected, abs=1e-7)
    assert nothing[0] == 200
    assert 0 < nothing[1]["predictions"][0] < 1
    assert (lacking[0], wrong[0]) == (400, 400)
    assert "site" in lacking[1]["message"]


def test_the_model_says_what_it_is_and_holds_no_pickle(study: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # MLflow's, of its own modules
        import mlflow.pyfunc

    own = client(study)
    (version,) = own.search_model_versions("name = 'study'")
    assert own.get_model_version_by_alias("study", "best").version == version.version
    info = read_bundle(study / "best").info
    assert f"NE on validation {info.validation.ne:.5f}" in version.description
    run = own.get_run(version.run_id)
    assert run.data.tags["trial.number"] == str(info.trial)
    files = [path for path in (study / "artifacts" / "models").rglob("*") if path.is_file()]
    kinds = {".py", ".txt", ".yaml", ".json", ".parquet", ".safetensors", ""}
    assert {path.suffix for path in files} <= kinds
    needed = next(path for path in files if path.name == "requirements.txt")
    assert needed.read_text().split() == requirements()
    definition = Path(unquote(urlsplit(version.source).path)) / "MLmodel"
    assert definition in files
    model = mlflow.pyfunc.load_model(str(definition.parent))
    inputs = model.metadata.signature.inputs.input_names()
    assert inputs == list(read_bundle(study / "best").encoding.schema.inputs)
    assert len(model.predict(model.input_example)) == 2


def test_registering_again_makes_no_further_version(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    said = dhen_search("register", study / "best").stdout
    assert "version 1 of the model study, alias best" in said
    assert "mlflow models serve" in said
    registered = json.loads(dhen_search("register", study / "best", "--json").stdout)
    assert (registered["model"], registered["version"], registered["alias"]) == ("study", 1, "best")
    assert len(client(study).search_model_versions("name = 'study'")) == 1
    dhen_search("export", study, "--pick", "lowest", "--out", tmp_path / "lowest")
    said = dhen_search("register", tmp_path / "lowest", "--name", "cheap/a", "--tracking", study).stdout
    assert "version 1 of the model cheap-a, alias best" in said
    for _ in range(2):  # which MLflow's conditions have no escape for
        said = dhen_search("register", tmp_path / "lowest", "--name", "bob's", "--tracking", study).stdout
        assert "version 1 of the model bob's, alias best" in said
    mistake = dhen_search("register", tmp_path / "lowest", "--tracking", tmp_path, code=2).stderr
    assert "MLflow no longer keeps runs in folders" in mistake
    assert "no bundle here" in dhen_search("register", tmp_path, "--tracking", study, code=2).stderr
