from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhen.errors import UserError
from trials.data.log_schema import LabelColumn, NumericColumn, SplitRule, TimestampColumn
from trials.data.prepare.prepare_log import prepare
from trials.data.raw.sources import CRITEO_COLUMNS, open_log
from trials.data.read_options import ReadOptions
from trials.data.roles import sample
from trials.data.roles.infer import default_buckets, default_min_count, infer, infer_schema

Columns = dict[str, list[Any]]


def test_a_click_log(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    schema = infer_schema([write_csv(clicks)])
    assert {name: column.role for name, column in schema.columns.items()} == {
        "request_id": "ignore",
        "event_time": "timestamp",
        "user_id": "categorical",
        "country": "categorical",
        "tags": "multi_hot",
        "price": "numeric",
        "dwell_seconds": "numeric",
        "example_weight": "weight",
        "click": "label",
    }
    assert schema.columns["price"] == NumericColumn(transform="log", buckets=6)  # of a hundred rows
    assert schema.columns["dwell_seconds"] == NumericColumn(transform="standard", buckets=6)
    assert schema.split == SplitRule(by="timestamp")


def test_criteo_with_and_without_header(tmp_path: Path) -> None:
    rows = ["\t".join([str(i % 2), *["5"] * 13, *["0a1b2c3d"] * 26]) for i in range(30)]
    raw, named = tmp_path / "raw.txt", tmp_path / "named.tsv"
    raw.write_text("\n".join(rows))
    named.write_text("\t".join((*CRITEO_COLUMNS, "extra")) + "\n" + "".join(f"{row}\t7\n" for row in rows))
    schema = infer_schema([raw])
    assert [schema.columns[name] for name in ("I1", "I13")] == [NumericColumn(transform="log", buckets=2)] * 2
    assert {schema.columns[f"C{i}"].role for i in range(1, 27)} == {"categorical"}
    assert schema.split.by == "auto"
    columns = dict(infer_schema([named]).columns)
    assert columns.pop("extra").role == "ignore"
    assert columns == schema.columns


def test_avazu(tmp_path: Path) -> None:
    names = "id,click,hour,C1,banner_pos,site_id,app_id,device_id,C14,C21"
    rows = [f"{i},{i % 2},141021{i % 24:02d},1005,0,1fbe01fe,ecad2386,a99f214a,15706,79" for i in range(50)]
    path = tmp_path / "train.csv"
    path.write_text("\n".join([names, *rows]))
    schema = infer_schema([path])
    roles = {name: column.role for name, column in schema.columns.items()}
    assert roles.pop("id") == "ignore"
    assert roles.pop("click") == "label"
    assert roles.pop("hour") == "timestamp"
    assert set(roles.values()) == {"categorical"}


def test_the_label(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    clicks["Outcome"] = clicks.pop("click")
    path = write_csv(clicks)
    with pytest.raises(UserError, match=r"no label column found.*one of: request_id, .*Outcome"):
        infer_schema([path])
    with pytest.raises(UserError, match="Did you mean 'Outcome'"):
        infer_schema([path], ReadOptions(label="outcome"))
    assert infer_schema([path], ReadOptions(label="Outcome")).label == "Outcome"
    with pytest.raises(UserError, match="'country' holds more than two values"):
        infer_schema([path], ReadOptions(label="country"))


def test_the_rarer_of_two_unknown_labels_is_positive(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    clicks["click"] = ["bought" if value else "left" for value in clicks["click"]]
    assert infer_schema([write_csv(clicks)]).columns["click"] == LabelColumn(positive="bought")


def test_spellings_of_one_label_are_counted_together(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    clicks["click"] = [
        "Sold",
        "Left",
        "Left",
        *("Sold" if value else "Kept" for value in clicks["click"][3:]),
    ]
    clicks["click"] = ["Kept" if value == "Left" else value for value in clicks["click"]]
    clicks["click"][5] = "kept"
    assert infer_schema([write_csv(clicks)]).columns["click"] == LabelColumn(positive="sold")


@pytest.mark.parametrize("name", ["Is Click", "isClicked", "Clicked?", "is.click", "TARGET", "_target"])
def test_labels_are_found_by_name(name: str, clicks: Columns, write_csv: Callable[..., Path]) -> None:
    clicks[name] = clicks.pop("click")
    clicks["y"] = clicks["click %"] = clicks["#click"] = clicks["country"]
    assert infer_schema([write_csv(clicks)]).label == name


def test_two_time_stamps_cannot_split(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    clicks["event_time"] = ["2024-01-01", "2024-01-02"] * 300
    schema = infer_schema([write_csv(clicks)])
    assert (schema.timestamp, schema.split.by) == (None, "auto")


def test_folders_of_days_and_countries_are_time_stamps_and_categories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of folders are looked at in all files, though only the first ones are read."""
    monkeypatch.setattr("trials.data.roles.infer.draw_sample", partial(sample.draw_sample, limit=100))
    for day in range(1, 11):
        for country in ("de", "nl"):
            folder = tmp_path / f"dt=2026-11-{day:02d}" / f"country={country}"
            folder.mkdir(parents=True)
            rows = [f"u{row % 7},{row % 2}" for row in range(60)]
            (folder / "part-0.csv").write_text("\n".join(["user,click", *rows]))
    schema = infer(open_log([tmp_path])).schema
    assert schema.columns["country"].role == "categorical"
    assert (schema.timestamp, schema.split.by) == ("dt", "timestamp")


def test_a_file_as_a_spreadsheet_writes_it_where_the_comma_is_decimal(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [
        f"{i // 40 + 1:02d}.03.2026 {i % 24:02d}:15;u{i % 7};{i % 50},{i % 9}5;x;;{i % 2}" for i in range(200)
    ]
    path.write_text("\n".join(["seen at;user;price;site;campaign;click", *rows]))
    inferred = infer(open_log([path]))
    columns = inferred.schema.columns
    assert columns["seen at"] == TimestampColumn(format="day_first")
    assert columns["price"] == NumericColumn(buckets=2, decimal=",")
    assert inferred.schema.split.by == "timestamp"
    assert inferred.sentences == ("not used: 'site' (constant: x)", "not used: 'campaign' (always missing)")


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("click,version\n" + "1,a\n0,a\n" * 30)
    with pytest.raises(UserError, match=r"no column besides the label 'click'.*version .constant: a."):
        infer_schema([path])
    path.write_text("click,version\n")
    with pytest.raises(UserError, match="only a header"):
        infer_schema([path])


def test_min_count_and_buckets_grow_with_the_log() -> None:
    assert [default_buckets(rows) for rows in (10, 600, 5_000, 10**7)] == [2, 6, 50, 256]
    counts = [default_min_count(rows) for rows in (10, 999_999, 1_000_000, 9_999_999, 45_000_000)]
    assert counts == [2, 2, 5, 5, 10]


def test_parquet_files_of_one_log_may_differ_in_types(tmp_path: Path) -> None:
    """Whole numbers on the one day, numbers on the next, because one is missing; a column that is all missing."""
    rows = 40
    site = [f"s{row % 5}" for row in range(rows)]
    first = {"click": [row % 2 for row in range(rows)], "age": list(range(rows)), "site": site}
    ages = [None, *map(float, range(1, rows))]
    second = first | {"age": ages, "site": pa.array(site).dictionary_encode()}
    third = first | {"age": pa.nulls(rows), "site": [row % 5 for row in range(rows)]}
    for name, columns in (("1", first), ("2", second), ("3", third)):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    schema = infer_schema([tmp_path])
    assert {name: column.role for name, column in schema.columns.items()} == {
        "click": "label",
        "age": "numeric",
        "site": "categorical",
    }
    pq.write_table(pa.table(first | {"site": [[name] for name in site]}), tmp_path / "4.parquet")
    with pytest.raises(UserError, match=r"column 'site' holds .* in files of one log: write it alike in all"):
        infer_schema([tmp_path])


def test_types_that_arrow_has_few_functions_for(tmp_path: Path) -> None:
    rows, path = 60, tmp_path / "log.parquet"
    ids = pa.array([bytes([row % 7]) * 16 for row in range(rows)], pa.binary(16))
    columns = {
        "click": pa.array([row % 2 for row in range(rows)]),
        "session": pa.ExtensionArray.from_storage(pa.uuid(), ids),
        "tags": pa.array(
            [f"a{row % 5}|b{row % 3}" if row % 4 else f"a{row % 5}" for row in range(rows)], pa.string_view()
        ),
        "price": pa.array(np.linspace(0.1, 9.9, rows), pa.float16()),
        "split": pa.array([{"a": 1}] * rows),
    }
    pq.write_table(pa.table(columns), path)
    roles = {name: column.role for name, column in infer_schema([path]).columns.items()}
    assert roles == {
        "click": "label",
        "session": "categorical",
        "tags": "multi_hot",
        "price": "numeric",
        "split": "ignore",
    }
    log = prepare([path])
    session = next(table for table in log.features.tables if table.name == "session")
    assert session.rows == 7 + 2  # missing, unknown
    pq.write_table(pa.table(columns | {"click": pa.array([[1]] * rows)}), path)
    with pytest.raises(UserError, match="not one value a row"):
        infer_schema([path], ReadOptions(label="click"))


def test_a_column_that_one_file_lacks_is_named(tmp_path: Path) -> None:
    for name, header in (("1.csv", "click,site"), ("2.csv", "click,site,device")):
        more = ",d" if "device" in header else ""
        (tmp_path / name).write_text(f"{header}\n" + "".join(f"{n % 2},s{n % 3}{more}\n" for n in range(40)))
    inferred = infer(open_log([tmp_path], None))
    assert "device" not in inferred.schema.columns
    assert "not used: 'device' (1.csv has no such column)" in inferred.sentences
