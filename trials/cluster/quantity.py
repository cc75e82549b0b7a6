"""Quantities as people write them: `80GiB`, `300GB/s`, `200Gb/s`, `312TFLOP/s`, `5us`, `0.1%`, or a plain number.

Plain numbers are bytes, bytes/s, FLOP/s and seconds. `B` is a byte, `b` a bit; `G` is 10**9, `Gi` is 2**30.
The annotated types are what pydantic fields are declared with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.)\s*([^\s0-9.]\S*)?\s*")
THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
SIZES = {f"{prefix}B": scale for prefix, scale in (THOUSANDS | BINARY).items()}
RATES = {f"{size}/s": scale for size, scale in SIZES.items()} | {
    f"{prefix}{bit}/s": scale / 8 for prefix, scale in THOUSANDS.items() for bit in ("b", "bit")
}
FLOPS = {f"{prefix}{word}": scale for prefix, scale in THOUSANDS.items() for word in ("FLOP/s", "FLOPS")}
PERCENT = {"%": 0.01}
AMBIGUOUS_SHARE = 0.01
"""Plain number from which a share of 1 could be meant in percent, and is refused."""
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_quantity(value: object, units: Mapping[str, float], example: str) -> float:
    """Returns the number in its plain unit.

    Raises:
        ValueError: for anything that is not a finite number of at least 0, alone or with one of the units.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _finite(float(value), example)
    match = NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected a number of at least 0, alone or with its unit, such as {example}")
    number, unit = float(match[1]), match[2]
    if unit is None:
        return _finite(number, example)
    if unit not in units:
        raise ValueError(f"unknown unit {unit!r}; write it as in {example}; known: {', '.join(units)}")
    return _finite(
        float(f"{number * units[unit]:.15g}"), example
    )  # 3.4us is 3.4e-06, not 3.3999999999999996e-06


def _finite(number: float, example: str) -> float:
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"expected a finite number of at least 0, such as {example}")
    return number


def parse_bytes(value: object) -> int:
    """Returns whole bytes, at least one."""
    return round(_at_least(1.0, parse_quantity(value, SIZES, "80GiB"), "80GiB"))


def parse_signed_bytes(value: object) -> int:
    """Returns whole bytes; a minus in front takes them off."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return -round(parse_quantity(-value, SIZES, "512MiB or -512MiB"))
    if isinstance(value, str) and value.strip().startswith("-"):
        return -round(parse_quantity(value.strip()[1:], SIZES, "512MiB or -512MiB"))
    return round(parse_quantity(value, SIZES, "512MiB or -512MiB"))


def parse_rate(value: object) -> float:
    """Returns bytes per second, at least one."""
    return _at_least(1.0, parse_quantity(value, RATES, "300GB/s"), "300GB/s")


def parse_flops(value: object) -> float:
    """Returns FLOP/s, at least one."""
    return _at_least(1.0, parse_quantity(value, FLOPS, "312TFLOP/s"), "312TFLOP/s")


def parse_time(value: object) -> float:
    """Returns seconds; 0 is allowed."""
    return parse_quantity(value, TIMES, "5us")


def parse_share(value: object) -> float:
    """Returns a small share of 1: `0.1%` is 0.001; 0.001 alone is read so too.

    Raises:
        ValueError: for a plain number of 0.01 or more, which could be meant in percent, and for shares above 1.
    """
    share = parse_quantity(value, PERCENT, "0.1%")
    if not str(value).strip().endswith("%") and share >= AMBIGUOUS_SHARE:
        raise ValueError(
            f"{share:g} could be {share:g} % or {100 * share:g} %; write the sign, such as {share:g}%"
        )
    if share > 1.0:
        raise ValueError(f"{100 * share:g}% is more than all there is; write it as in 0.1%")
    return share


def byte_words(count: float) -> str:
    """Returns bytes as people write them, with about three digits: `512 B`, `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def _at_least(least: float, number: float, example: str) -> float:
    if number < least:
        raise ValueError(f"must be greater than 0, such as {example}")
    return number


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
SignedBytes = Annotated[int, BeforeValidator(parse_signed_bytes)]
BytesPerSecond = Annotated[float, BeforeValidator(parse_rate)]
FlopsPerSecond = Annotated[float, BeforeValidator(parse_flops)]
Seconds = Annotated[float, BeforeValidator(parse_time)]
Share = Annotated[float, BeforeValidator(parse_share)]
