from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.names import MISSING, byte_size, decimals, duration, percent, ratio, si

FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@given(st.floats(min_value=1, max_value=1e17))
def test_si_keeps_three_digits(value: float) -> None:
    number, _, prefix = si(value).partition(" ")
    assert float(number) * FACTORS[prefix] == pytest.approx(value, rel=0.006)


def test_units() -> None:
    assert [si(value) for value in (0, 999.6, 12_345, 1.4e6)] == ["0", "1.00 k", "12.3 k", "1.40 M"]
    durations = [duration(seconds) for seconds in (0, 9.96, 59.6, 3599.7, 3660)]
    assert durations == ["0.0 s", "10 s", "1 min 00 s", "1 h 00 min", "1 h 01 min"]
    assert [percent(value) for value in (-0.271, 0.5, -0.001)] == ["-0.27 %", "+0.50 %", "0.00 %"]
    assert [byte_size(value) for value in (12, 1536, 3 * 2**30)] == ["12 B", "1.5 KiB", "3.0 GiB"]
    assert [ratio(value) for value in (0.4426, 12.0)] == ["0.443x", "12x"]
    assert decimals(0.781234, 5) == "0.78123"


@pytest.mark.parametrize(
    "function", [si, duration, percent, ratio, byte_size, lambda value: decimals(value, 3)]
)
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(function, value) -> None:
    assert function(value) == MISSING
