"""Columns that say how a log is split, as public sets have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dhen.errors import UserError
from trials.data.log_schema import SplitRule
from trials.data.prepare.prepare_log import prepare
from trials.data.raw.sources import open_log
from trials.data.roles.infer import InferredSchema, infer
from trials.data.roles.outcomes import find_split
from trials.data.roles.sample import ColumnSample, draw_sample

Columns = dict[str, list[Any]]
WriteCsv = Callable[..., Path]
WriteLog = Callable[..., Path]


@pytest.fixture
def write_with(clicks: Columns, write_csv: WriteCsv) -> WriteLog:
    """Writes the click log with one more column, of these values in turn or of parts of these lengths."""

    def write(name: str, values: list[Any], parts: list[int] | None = None) -> Path:
        if parts is None:
            cells = [values[i % len(values)] for i in range(600)]
        else:
            cells = [value for value, rows in zip(values, parts, strict=True) for _ in range(rows)]
        return write_csv({**clicks, name: cells})

    return write


def inferred(path: Path) -> InferredSchema:
    return infer(open_log([path]))


@pytest.mark.parametrize(
    ("name", "values", "validation", "test"),
    [
        ("split", ["train", "val", "test"], ("val",), ("test",)),
        ("Split", ["Train", "Valid", "Test", ""], ("Valid",), ("Test",)),
        ("data_split", ["training", "dev", "test"], ("dev",), ("test",)),
        ("subset", ["train", "eval", "holdout"], ("eval",), ("holdout",)),
        ("partition", ["train", "validation", "eval"], ("validation",), ("eval",)),
        ("set", ["train", "dev", "test"], ("dev",), ("test",)),
    ],
)
def test_a_column_of_names_becomes_the_split(
    write_with: WriteLog, name: str, values: list[str], validation: tuple[str, ...], test: tuple[str, ...]
) -> None:
    path = write_with(name, values)
    found = inferred(path)
    assert found.schema.columns[name].role == "split"
    assert found.schema.split == SplitRule(by="column", validation=validation, test=test)
    log = prepare([path])
    each = 600 // len(values)
    assert log.summary().rows == {"train": each * (len(values) - 2), "validation": each, "test": each}
    features = log.features
    assert name not in (*(table.name for table in features.categorical), *features.numeric)
    assert log.notes[0] == (
        f"rows are split by the column {name!r}: validation is {validation[0]}, test is {test[0]}, the others are "
        "for training; it is no feature. To split by timestamp instead: "
        "`split: {by: timestamp, validation: 0.1, test: 0.1}` in schema.yaml "
        "(`dhen-search prepare LOG --out DIR` writes it)"
    )


def test_what_the_sentence_says_undoes_it(write_with: WriteLog, tmp_path: Path) -> None:
    path, out = write_with("split", ["train", "val", "test"]), tmp_path / "prepared"
    prepare([path], out=out)
    text = (out / "schema.yaml").read_text()
    by_column = "split: {by: column, validation: [val], test: [test]}"
    assert by_column in text
    rule = "split: {by: timestamp, validation: 0.1, test: 0.1}"
    (out / "schema.yaml").write_text(text.replace(by_column, rule))
    log = prepare([path], out=out)
    assert log.summary().rows == {"train": 480, "validation": 60, "test": 60}
    assert "split" not in [table.name for table in log.features.categorical]


def test_a_part_that_no_value_names_is_cut_from_the_training_rows(write_with: WriteLog) -> None:
    path = write_with("split", ["train", "test"], parts=[500, 100])
    assert inferred(path).schema.split == SplitRule(by="timestamp", validation=0.1, test=("test",))
    log = prepare([path])
    assert log.summary().rows == {"train": 450, "validation": 50, "test": 100}
    assert "validation is 10% of the training rows (by timestamp), test is test" in log.notes[0]


def test_all_rows_are_looked_at_where_the_first_are_for_training(write_with: WriteLog) -> None:
    """Their sample shows one value, which is a constant for other columns."""
    path = write_with("split", ["train", "val", "test"], parts=[400, 100, 100])
    whole = draw_sample(open_log([path]), ["split"], skip_bad_rows=False).columns["split"]
    first = ColumnSample("split", whole.raw.slice(0, 50), complete=False)
    assert first.constant
    found = find_split(open_log([path]), first, SplitRule(), skip_bad_rows=False)
    assert found.rule == SplitRule(by="column", validation=("val",), test=("test",))


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("fold", [0, 1, 2, 3, 4], "split: {by: column, validation: [3], test: [4]}"),
        ("kfold", [1, 2, 3], "split: {by: column, validation: [2], test: [3]}"),
        ("partition", [0, 1], "split: {by: timestamp, validation: 0.1, test: [1]}"),
    ],
)
def test_numbers_of_folds_are_offered_and_no_feature(
    write_with: WriteLog, name: str, values: list[int], rule: str, tmp_path: Path
) -> None:
    path, out = write_with(name, values), tmp_path / "prepared"
    log = prepare([path], out=out)
    assert log.schema.split == SplitRule(by="timestamp")
    assert name not in [table.name for table in log.features.categorical]
    assert f"`{name}: {{role: split}}` and `{rule}`" in log.notes[0]
    lines = (out / "schema.yaml").read_text().splitlines()
    lines = [f"  {name}: {{role: split}}" if line.startswith(f"  {name}:") else line for line in lines]
    lines = [rule if line.startswith("split:") else line for line in lines]
    (out / "schema.yaml").write_text("\n".join(lines))
    taken = prepare([path], out=out)  # the lines as the sentence has them
    assert taken.summary().rows["test"] == 600 // len(values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("split_payment", ["yes", "no"]),
        ("split_count", [0, 1, 2]),
        ("partition", ["north", "south"]),
        ("subset", [3, 7, 12]),
        ("phase", ["1", "2"]),
        ("environment", ["train", "test"]),
    ],
)
def test_other_columns_stay_features(write_with: WriteLog, name: str, values: list[Any]) -> None:
    found = inferred(write_with(name, values))
    assert found.schema.columns[name].role in ("categorical", "numeric")
    assert [each for each in found.sentences if not each.startswith("not used: 'request_id'")] == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["val", "test"], "names no training rows (val, test)"),
        (["train", "Training"], "names no validation or test rows (train, Training)"),
    ],
)
def test_a_split_without_training_rows_or_without_others_is_left_out_and_said(
    write_with: WriteLog, values: list[str], says: str
) -> None:
    found = inferred(write_with("split", values))
    assert found.schema.columns["split"].role == "ignore"
    assert found.schema.split == SplitRule(by="timestamp")
    assert says in found.sentences[0]


def test_of_two_columns_the_first_is_the_split(clicks: Columns, write_csv: WriteCsv) -> None:
    clicks["split"] = [("train", "val", "test")[i % 3] for i in range(600)]
    clicks["old_split"] = [("train", "test")[i % 2] for i in range(600)]
    found = inferred(write_csv(clicks))
    assert [found.schema.columns[name].role for name in ("split", "old_split")] == ["split", "ignore"]
    assert found.schema.split.by == "column"
    assert "'old_split' looks like a split too: it is no feature, and 'split' is used" in found.sentences[1]


def test_a_log_without_the_column_is_split_by_time_where_the_schema_is_of_another_log(
    write_with: WriteLog, clicks: Columns, write_csv: WriteCsv
) -> None:
    """A model searched on an official split is trained again on a later log that has none."""
    log = prepare([write_with("split", ["train", "val", "test"])])
    later = write_csv(clicks, "later.csv")
    with pytest.raises(UserError, match="unknown column in the schema 'split'"):
        prepare([later], schema=log.schema)
    sentence = "the log has no column 'split' to be split by: it is split by timestamp"
    for how in ({"schema": log.schema, "of_another_log": True}, {"encoding": log.encoding}):
        again = prepare([later], **how)  # type: ignore[arg-type]
        assert again.summary().rows == {"train": 480, "validation": 60, "test": 60}
        assert again.notes[0] == sentence
    files = log.schema.replace(split=SplitRule(by="order", test=("official.csv",)))
    columns = {name: column for name, column in files.columns.items() if column.role != "split"}
    files = files.replace(columns=columns, negative_sampling_rate=0.5)  # another schema: nothing is cached
    again = prepare([later], schema=files, of_another_log=True)
    assert again.notes[0] == "the log has no file 'official.csv' to be split by: it is split by timestamp"
