"""What the rules make of columns as logs hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trials.data.log_schema import (
    CategoricalColumn,
    Column,
    MultiHotColumn,
    NumericColumn,
    TimestampColumn,
)
from trials.data.roles.rules import judge
from trials.data.roles.sample import ColumnSample

RNG = np.random.default_rng(3)
ROWS = 2000


def judged(name: str, values: Any) -> Column:
    column = values if isinstance(values, pa.Array) else pa.array([str(value).encode() for value in values])
    return judge(ColumnSample(name, column)).column


def whole(low: int, high: int) -> list[int]:
    return RNG.integers(low, high, ROWS).tolist()


def transform_of(name: str, values: Any) -> str:
    column = judged(name, values)
    assert isinstance(column, NumericColumn)
    return column.transform


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("industry_recode", whole(0, 52)),
        ("wheel_kind", whole(0, 30)),
        ("num_doors", whole(1, 6)),
        ("userId", whole(0, 10**4)),
        ("item-id", whole(0, 400)),
        ("zip", [f"{value:05d}" for value in whole(0, 9_999)]),
        ("fraction_code", [f"0{value}" for value in whole(0, 900)]),
        ("is_mobile", RNG.choice(["true", "false"], ROWS)),
        ("query", RNG.choice(["red shoes", "blue shoes", "big hat", "sun hat, yellow"], ROWS)),
        ("maybe", RNG.choice(["x", ""], ROWS)),
    ],
)
def test_categorical_columns(name: str, values: Any) -> None:
    assert isinstance(judged(name, values), CategoricalColumn)


@pytest.mark.parametrize(
    ("name", "values", "transform"),
    [
        ("age", whole(18, 90), "standard"),
        ("weeks_worked", whole(0, 53), "standard"),
        ("education_num", whole(1, 17), "standard"),
        ("bid", RNG.normal(3, 1, ROWS), "standard"),
        ("balance", RNG.normal(0, 1, ROWS) ** 7, "log"),
        ("capital_gains", np.where(RNG.random(ROWS) < 0.95, 0, RNG.integers(1, 99_999, ROWS)), "log"),
        ("pixels", np.floor(RNG.lognormal(3, 2, ROWS)).astype(int), "log"),
    ],
)
def test_numeric_columns(name: str, values: Any, transform: str) -> None:
    assert transform_of(name, values) == transform


def test_a_few_typing_errors_do_not_make_numbers_text() -> None:
    assert isinstance(judged("price", [*RNG.lognormal(0, 1, ROWS), "12 EUR"]), NumericColumn)
    assert isinstance(judged("price", [*RNG.integers(0, 60, 99), "a", "b"]), CategoricalColumn)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("request", [f"{value:x}" for value in range(ROWS)]),
        ("row_id", [value * 7 for value in range(ROWS)]),
        ("counter", list(range(ROWS))),
        ("version", ["1.0"] * ROWS),
        ("empty", [""] * ROWS),
        ("struct", pa.array([{"a": 1}] * ROWS)),
    ],
)
def test_ignored_columns(name: str, values: Any) -> None:
    assert judged(name, values).role == "ignore"


def test_ids_that_may_come_back_in_a_larger_log() -> None:
    ids = pa.array([f"{value:x}" for value in range(ROWS)])
    for name, role in (
        ("user_id", "categorical"),
        ("device_ip", "categorical"),
        ("request_id", "ignore"),
        ("id", "ignore"),
    ):
        assert judge(ColumnSample(name, ids, complete=False)).column.role == role
        assert judge(ColumnSample(name, ids)).column.role == "ignore"


def test_multi_hot_text_and_lists() -> None:
    for separator in "|^;, ":
        bags = [separator.join(f"t{i}" for i in RNG.choice(15, RNG.integers(0, 5))) for _ in range(ROWS)]
        assert judged("interests", bags) == MultiHotColumn(separator=separator)
    assert judged("history", pa.array([["a"], [], ["b", "a"], None])) == MultiHotColumn(separator=None)


def test_numbers_whose_thousands_are_grouped_are_no_bags() -> None:
    amounts = pa.array([f"{value:,}".encode() for value in RNG.integers(1, 100_000, ROWS)])
    grouped = judge(ColumnSample("price", amounts)).column
    assert isinstance(grouped, NumericColumn)
    assert grouped.thousands == ","
    bags = [",".join(map(str, 100 + RNG.choice(15, RNG.integers(1, 5)))) for _ in range(ROWS)]
    assert judged("interests", bags) == MultiHotColumn(separator=",")


SECONDS = RNG.integers(1_700_000_000, 1_700_900_000, ROWS)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("ts", SECONDS, "seconds"),
        ("event_time", SECONDS * 1000, "milliseconds"),
        ("createdAt", SECONDS * 1_000_000, "microseconds"),
        ("time", SECONDS * 1_000_000_000, "nanoseconds"),
        ("when", [f"2014-10-{day} 17:05:00 UTC" for day in range(10, 31)], "iso"),
        ("when", SECONDS.astype("M8[s]"), "iso"),
        ("hour", [f"1410{day:02d}{hour:02d}" for day in range(21, 31) for hour in range(24)], "yymmddhh"),
        ("date", [f"201410{day:02d}" for day in range(1, 31)], "yyyymmdd"),
        ("hour", [f"201410{day:02d}05" for day in range(1, 31)], "yyyymmddhh"),
        ("timestamp", [f"201410{day:02d}050607" for day in range(1, 31)], "yyyymmddhhmmss"),
        ("d", pa.array(SECONDS.astype("M8[s]")), "iso"),
        ("seen", [f"{day}.11.2026 17:05" for day in range(1, 12)], "day_first"),
        ("seen", [f"{day}/11/2026" for day in range(1, 30)], "day_first"),
        ("seen", [f"11/{day}/2026 5:0{day % 10} PM" for day in range(1, 30)], "month_first"),
    ],
)
def test_time_stamps(name: str, values: Any, expected: str) -> None:
    column = judged(name, values)
    assert isinstance(column, TimestampColumn)
    assert column.format == expected


def test_dates_whose_day_could_be_the_month_are_left_to_the_user() -> None:
    unclear = judge(ColumnSample("seen", pa.array([f"0{day}/11/2026".encode() for day in range(1, 9)])))
    assert unclear.column.role == "ignore"
    assert "day_first (or month_first)" in str(unclear.sentence)


def test_decimal_commas_are_looked_for_where_fields_end_with_semicolons() -> None:
    bags = [",".join(map(str, RNG.integers(10, 99, RNG.integers(1, 4)))) for _ in range(ROWS)]
    assert isinstance(judged("price", bags), CategoricalColumn | MultiHotColumn)
    prices = [f"{value},{value % 90 + 10}" if value % 9 else str(value) for value in whole(0, 500)]
    column = pa.array([price.encode() for price in prices])
    assert isinstance(judge(ColumnSample("price", column)).column, CategoricalColumn | MultiHotColumn)
    number = judge(ColumnSample("price", column, commas=True)).column
    assert isinstance(number, NumericColumn)
    assert number.decimal == ","
    thousands = [f"{value % 9 + 1},{value:03d}" for value in whole(0, 999)]
    for other, decimal in (("7,125", "."), ("0,125", ","), ("-0,125", ","), ("1250,125", ",")):
        values = pa.array([value.encode() for value in (*thousands, other)])
        number = judge(ColumnSample("price", values, commas=True)).column
        assert isinstance(number, NumericColumn)
        assert number.decimal == decimal, other


def test_roles_by_name() -> None:
    assert not isinstance(judged("ad_id", SECONDS), TimestampColumn)
    assert not isinstance(judged("hour", whole(0, 24)), TimestampColumn)
    assert judged("sample_weight", [1.0, 2.0, 0.0]).role == "weight"
    assert judged("weight", [-1.0, 2.5, 80.0]).role == "numeric"
    assert judged("oracle_probability", [0.1, 0.2]).role == "oracle"
