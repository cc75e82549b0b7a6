"""What benchmarks of many trainings share: a file with what each came to, and the interval of a mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95


def kept(out: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what the file has of trainings with these settings; nothing if there is none."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return [line for line in lines if settings.items() <= line.items()]


def keep(out: Path, line: Mapping[str, Any]) -> None:
    """Appends what a training came to."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def half_interval(values: NDArray[np.float64]) -> float:
    """Returns half the width of the t-interval of a mean."""
    error = values.std(ddof=1) / len(values) ** 0.5
    return float(error * stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1))
