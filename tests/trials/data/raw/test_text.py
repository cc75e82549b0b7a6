from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data.log_schema import MISSING_MARKS, NumericColumn
from trials.data.raw.columns import as_text, coded, numbers_of


def test_equal_values_get_equal_codes_whatever_their_spaces() -> None:
    column = coded(pa.array([b" a", b"a ", b"b", None, b"?", b" NA ", b""]))
    assert column.to_pylist() == ["a", "a", "b", None, None, None, None]
    assert column.dictionary.to_pylist() == ["a", "b"]


@given(st.lists(st.one_of(st.none(), st.text(alphabet="ab ?é", max_size=4))))
def test_coding_cleans_and_keeps_the_order(values: list[str | None]) -> None:
    expected = [
        None if value is None or value.strip() in MISSING_MARKS else value.strip() for value in values
    ]
    assert coded(pa.array(values, pa.string())).to_pylist() == expected


def test_a_column_reads_alike_in_csv_and_in_parquet() -> None:
    assert as_text(pa.array([3.0, None, 2.5])).to_pylist() == ["3", None, "2.5"]
    assert as_text(pa.array([3, None])).to_pylist() == ["3", None]
    assert as_text(pa.array([True, False])).to_pylist() == ["true", "false"]
    assert as_text(pa.array(["x", "y", "x"]).dictionary_encode()).to_pylist() == ["x", "y", "x"]
    assert coded(pa.array([3.0, 3.0, float("nan")])).to_pylist() == ["3", "3", None]


def test_ids_that_are_floats_because_one_is_missing_are_whole_numbers() -> None:
    ids = [9876543210123, 10**10, 2, 1234567890123456768]
    floats = pa.array([*map(float, ids), None, 2.5, 1e25, float("inf")])
    assert as_text(floats).to_pylist() == [*map(str, ids), None, "2.5", "1e+25", "inf"]
    assert coded(floats).to_pylist()[:4] == coded(pa.array(ids)).to_pylist()


def test_bytes_that_are_no_utf8_are_read_as_latin1() -> None:
    assert as_text(pa.array(["Curaçao".encode(), "Curaçao".encode("latin-1")])).to_pylist() == [
        "Curaçao",
        "Curaçao",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        (" 2.5 ", 2.5),
        ("-3e2", -300),
        ("+4.", 4),
        (".5", 0.5),
        ("1e999", None),
        ("inf", None),
        ("-Infinity", None),
    ],
)
def test_numbers(text: str, number: float | None) -> None:
    numbers, bad = numbers_of(pa.array([text, "x"]))
    assert bad.tolist() == [False, True]
    assert math.isnan(numbers[0]) if number is None else numbers[0] == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18,72", 18.72),
        ("-3,", -3.0),
        ("1.234,50", 1234.5),
        ("1.234.567", 1234567.0),
        ("7", 7.0),
        ("2,5e3", 2500.0),
    ],
)
def test_numbers_with_a_decimal_comma(text: str, number: float) -> None:
    numbers, bad = numbers_of(pa.array([text, "3.14", "1,2,3", "1.23,4", None]), NumericColumn(decimal=","))
    assert bad.tolist() == [False, True, True, True, False]
    assert numbers[0] == number
    assert np.isnan(numbers[1:]).all()
    assert numbers_of(pa.array([18.72]), NumericColumn(decimal=","))[0].tolist() == [18.72]


@pytest.mark.parametrize("mark", MISSING_MARKS)
def test_missing_numbers(mark: str) -> None:
    numbers, bad = numbers_of(pa.array([mark, f" {mark} ", "7"]))
    assert not bad.any()
    assert np.isnan(numbers).tolist() == [True, True, False]


@pytest.mark.parametrize("text", ["1,5", "0x10", "12 EUR", "true", "1_000", "--1", "1e", "."])
def test_what_is_no_number(text: str) -> None:
    assert numbers_of(pa.array([text, "1"]))[1].tolist() == [True, False]


@given(st.lists(st.floats(-1e149, 1e149)))
def test_every_number_survives_text(values: list[float]) -> None:
    numbers, bad = numbers_of(pa.array([repr(value).encode() for value in values], pa.binary()))
    assert not bad.any()
    assert numbers.tolist() == values


def test_numbers_too_large_to_square_are_missing() -> None:
    numbers, bad = numbers_of(pa.array([1.7976931348623157e308, -1e200, 1e100, 3.0]))
    assert [math.isnan(number) for number in numbers] == [True, True, False, False]
    assert not bad.any()


def test_typed_numbers() -> None:
    assert numbers_of(pa.array([1, None], pa.int8()))[0].tolist()[0] == 1.0
    assert numbers_of(pa.array([True, False]))[0].tolist() == [1.0, 0.0]
    assert np.isnan(numbers_of(pa.array([math.inf, None]))[0]).all()


def test_whole_numbers_and_truth_values_have_one_spelling() -> None:
    """A CSV has 3.0 for an id where another one is missing, and a data frame of it has numbers."""
    written = coded(pa.array(["3.0", "3", " True", "FALSE", "3.50", "v1.0", "007.0"]))
    assert written.to_pylist() == ["3", "3", "true", "false", "3.50", "v1.0", "007"]
    assert coded(pa.array([3.0, None])).to_pylist() == coded(pa.array(["3.0", ""])).to_pylist()
    assert coded(pa.array([True, False])).to_pylist() == coded(pa.array(["True", "False"])).to_pylist()
