"""Numbers in words: the one place that decides how many digits a reader sees."""

from __future__ import annotations

import math

MISSING = "–"
PREFIXES = ("", "k", "M", "G", "T", "P")


def known(value: float | None) -> bool:
    """Whether a value is neither missing nor NaN nor infinite, so that it can be shown and drawn."""
    return value is not None and math.isfinite(value)


def word(value: str | None) -> str:
    """A name or a remark; empty where there is none."""
    return value or ""


def decimals(value: float | None, digits: int) -> str:
    """A number with so many digits after the point: `0.81234`."""
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else MISSING


def percent(value: float | None) -> str:
    """A signed difference: `-0.27 %`."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:+.2f} %" if abs(value) >= 0.005 else "0.00 %"


def percent_range(low: float | None, high: float | None) -> str:
    """A range of signed differences: `-0.41 to -0.12 %`."""
    return f"{percent(low).removesuffix(' %')} to {percent(high)}"


def ratio(value: float | None) -> str:
    """A ratio in three digits: `0.42x`, `13x`."""
    return f"{value:.3g}x" if value is not None and math.isfinite(value) else MISSING


def si(value: float | None) -> str:
    """A number in three digits, with a prefix for thousands: `1.23 M`, `998`, `12`."""
    if value is None or not math.isfinite(value):
        return MISSING
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    if not power:
        return f"{value:.3g}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {PREFIXES[power]}"


def byte_size(value: float | None) -> str:
    """A number of bytes with its unit: `1.5 GiB`."""
    if value is None or not math.isfinite(value):
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def milliseconds(value: float | None) -> str:
    """A time in three digits: `0.531 ms`, `12.4 ms`."""
    return f"{value:.3g} ms" if value is not None and math.isfinite(value) else MISSING


def duration(seconds: float | None) -> str:
    """A time in words: `0.4 s`, `12 s`, `3 min 05 s`, `1 h 07 min`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
