"""Encodings as they are fitted by `prepare`, checked against a naive reading of the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from trials.data.encoding import CLIP, Encoding, NumericScale, transform
from trials.data.log_schema import (
    CategoricalColumn,
    LogSchema,
    MultiHotColumn,
    NumericColumn,
    TimestampColumn,
)
from trials.data.prepare import fit
from trials.data.prepare.prepare_log import prepare
from trials.data.roles.infer import infer_schema
from trials.data.vocabulary import hashed_ids

Columns = dict[str, list[Any]]
TRAIN = 480  # of 600 rows, in the order of the log


@pytest.fixture
def encoding(clicks: Columns, write_csv: Callable[..., Path]) -> Encoding:
    return prepare([write_csv(clicks)]).encoding


def ids(encoding: Encoding, name: str, values: list[Any]) -> list[int]:
    """What a categorical table makes of values."""
    names = [table.name for table in encoding.features.categorical]
    batch = {column: [None] * len(values) for column in encoding.schema.inputs} | {name: values}
    return transform(pa.RecordBatch.from_pydict(batch), encoding).categorical[:, names.index(name)].tolist()


def test_vocabularies_hold_what_the_training_rows_hold(encoding: Encoding, clicks: Columns) -> None:
    counts = Counter(str(user) for user in clicks["user_id"][:TRAIN])
    ranked = sorted((-count, value) for value, count in counts.items() if count >= 2)
    expected = {value: 2 + place for place, (_, value) in enumerate(ranked)}
    unseen = [*(value for value, count in counts.items() if count < 2), "never"]
    assert ids(encoding, "user_id", list(expected)) == list(expected.values())
    assert ids(encoding, "user_id", unseen) == [1] * len(unseen)
    assert ids(encoding, "user_id", [None, " ", "NA"]) == [0, 0, 0]
    tables = {table.name: table.rows for table in encoding.features.tables}
    assert tables["user_id"] == 2 + len(expected)
    assert tables == {
        "user_id": tables["user_id"],
        "country": 5,
        "hour_of_day": 26,
        "day_of_week": 9,
        "price__bucket": 8,  # a hundred rows per bucket
        "dwell_seconds__bucket": 8,
        "tags": 14,
    }


def test_nothing_is_learnt_from_later_rows(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    before = prepare([write_csv(clicks)]).encoding
    clicks["user_id"][TRAIN:] = [777] * (600 - TRAIN)
    clicks["tags"][TRAIN:] = ["new|newer"] * (600 - TRAIN)
    clicks["price"][TRAIN:] = [1e6] * (600 - TRAIN)
    clicks["dwell_seconds"][TRAIN:] = [""] * (600 - TRAIN)
    schema = before.schema
    after = prepare([write_csv(clicks)], schema=schema).encoding
    assert after.fingerprint == before.fingerprint
    assert after.features == before.features


def test_numbers(encoding: Encoding, clicks: Columns) -> None:
    assert encoding.features.numeric == ("price", "dwell_seconds", "price__missing")
    known = np.array([p for p in clicks["price"][:TRAIN] if p != ""], dtype=float)
    logs, dwell = np.log1p(known), np.array(clicks["dwell_seconds"][:TRAIN], dtype=float)
    batch = {name: [None, None] for name in encoding.schema.inputs} | {
        "price": [b"12.5", b"?"],
        "dwell_seconds": [b"-inf", b"60"],
    }
    rows = transform(pa.RecordBatch.from_pydict(batch), encoding).numeric
    z_price = (np.log1p(12.5) - logs.mean()) / logs.std()
    np.testing.assert_allclose(rows[0], [z_price, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(rows[1], [0.0, (60 - dwell.mean()) / dwell.std(), 1.0], rtol=1e-6)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1), st.sampled_from(["standard", "log"]))
def test_no_number_breaks_a_training(values: list[float], how: str) -> None:
    z = NumericScale(transform=how, mean=0.5, std=1e-6, indicator=False).apply(np.array([*values, np.nan]))
    assert z.dtype == np.float32
    assert np.abs(z).max() <= CLIP
    assert z[-1] == 0.0


def test_cycles(encoding: Encoding) -> None:
    stamps = ["2024-01-01 05:30:00", "2024-02-04T23:00:00Z", ""]  # a Monday and a Sunday
    assert transform_stamp(encoding, stamps) == [[7, 2], [25, 8], [0, 0]]
    with pytest.raises(UserError, match="'soon', which is no time stamp in the format iso"):
        transform_stamp(encoding, ["soon"])


def transform_stamp(encoding: Encoding, stamps: list[str]) -> list[list[int]]:
    batch = {name: [None] * len(stamps) for name in encoding.schema.inputs} | {"event_time": stamps}
    names = [table.name for table in encoding.features.categorical]
    places = [names.index("hour_of_day"), names.index("day_of_week")]
    rows = transform(pa.RecordBatch.from_pydict(batch), encoding).categorical[:, places]
    return rows.tolist()


def test_bags(encoding: Encoding) -> None:
    batch = {name: [None] * 5 for name in encoding.schema.inputs}
    batch["tags"] = ["t1|t2|t1", "", None, " t2 |unheard", "NA|"]
    bags = transform(pa.RecordBatch.from_pydict(batch), encoding).bags[0]
    t1, t2 = bags.ids[0], bags.ids[1]
    assert bags.ids.tolist() == [t1, t2, t1, t2, 1]
    assert min(t1, t2) >= 2
    assert bags.offsets.tolist() == [0, 3, 3, 3, 5, 5]


def with_columns(schema: LogSchema, **columns: Any) -> LogSchema:
    return schema.replace(columns={**schema.columns, **columns})


def test_hash_buckets(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    path = write_csv(clicks)
    schema = with_columns(
        infer_schema([path]),
        user_id=CategoricalColumn(hash_buckets=16),
        tags=MultiHotColumn(separator="|", hash_buckets=4),
    )
    encoding = prepare([path], schema=schema).encoding
    rows = {table.name: table.rows for table in encoding.features.tables}
    assert (rows["user_id"], rows["tags"]) == (18, 6)
    assert ids(encoding, "user_id", ["5", "never seen", None]) == [
        *hashed_ids(pa.array(["5", "never seen"]), 16),
        0,
    ]


def test_auto_hashes_what_is_too_large(
    clicks: Columns, write_csv: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "MAX_VOCABULARY", 15)
    monkeypatch.setattr(fit, "AUTO_BUCKETS", 32)
    log = prepare([write_csv(clicks)])
    buckets = {name: column.hash_buckets for name, column in log.schema.tables.items()}
    assert buckets == {"user_id": 32, "country": None, "tags": None}
    assert "'user_id' has so many values that they are hashed into 32 buckets" in log.notes


def test_a_table_is_derived_only_where_its_cycle_is_seen(
    clicks: Columns, write_csv: Callable[..., Path]
) -> None:
    clicks["event_time"] = [f"2024-01-0{1 + i // 150} {i % 24:02d}:00:00" for i in range(600)]
    log = prepare([write_csv(clicks)])
    column = log.schema.columns["event_time"]
    assert isinstance(column, TimestampColumn)
    assert column.derive == ("hour_of_day",)
    assert log.notes[-1] == "no table day_of_week: the training rows do not span it"


def test_an_indicator_needs_missing_training_values(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    clicks["price"][:TRAIN] = [1.5] * TRAIN
    path = write_csv(clicks)
    schema = with_columns(infer_schema([path]), price=NumericColumn())
    log = prepare([path], schema=schema)
    assert log.features.numeric == ("price", "dwell_seconds")
    assert np.all(log.split("train").inputs.numeric[:, 0] == 0.0)  # constant: no division by zero


def test_saved_and_loaded(encoding: Encoding, tmp_path: Path) -> None:
    encoding.save(tmp_path / "encoding")
    loaded = Encoding.load(tmp_path / "encoding")
    assert loaded.fingerprint == encoding.fingerprint
    assert loaded.features == encoding.features
    (tmp_path / "encoding" / "numeric.json").write_text("{}x")
    with pytest.raises(UserError, match=r"numeric\.json"):
        Encoding.load(tmp_path / "encoding")
    with pytest.raises(UserError, match=r"tables\.json"):
        Encoding.load(tmp_path)


def test_odd_column_names_make_safe_files(
    clicks: Columns, write_csv: Callable[..., Path], tmp_path: Path
) -> None:
    odd = ["../up", "a/b:c", "CON", "naïve é", "x" * 300, 'q"uote', "new\nline", "a_b:c"]
    for name in odd:
        clicks[name] = clicks["country"]
    log = prepare([write_csv(clicks)], out=tmp_path / "out")
    files = list((log.directory / "encoding" / "vocabulary").iterdir())
    assert len(files) == len(odd) + 3
    assert all(len(file.name) < 60 and file.name.isascii() for file in files)
    assert set(odd) <= {table.name for table in log.features.tables}
    assert Encoding.load(log.directory / "encoding").fingerprint == log.encoding.fingerprint
