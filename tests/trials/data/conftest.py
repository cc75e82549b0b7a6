"""A small click log with a column of every kind, and where tests may keep caches."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Columns = dict[str, list[Any]]
WriteCsv = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def clicks() -> Columns:
    """600 rows over 40 days, an hour each: ids, a code, a bag, two numbers (one with gaps), a weight."""
    rng = np.random.default_rng(7)
    rows = 600
    hours = np.sort(rng.choice(40 * 24, rows, replace=False))
    start = np.datetime64("2024-01-01T00:00:00")
    tags = [[f"t{t}" for t in rng.choice(12, rng.integers(0, 4), replace=False)] for _ in range(rows)]
    price = [round(float(p), 2) if rng.random() > 0.1 else "" for p in rng.lognormal(2, 1.5, rows)]
    return {
        "request_id": [f"{i * 7919:012x}" for i in range(rows)],
        "event_time": [str(start + np.timedelta64(int(h), "h")).replace("T", " ") for h in hours],
        "user_id": [int(u) for u in rng.zipf(1.5, rows) % 90],
        "country": [str(c) for c in rng.choice(["NL", "DE", "", "Curaçao"], rows)],
        "tags": ["|".join(t) for t in tags],
        "price": price,
        "dwell_seconds": [int(s) for s in rng.integers(0, 300, rows)],
        "example_weight": [float(w) for w in rng.choice([1.0, 2.0], rows)],
        "click": [int(c) for c in rng.random(rows) < 0.3],
    }


@pytest.fixture
def write_csv(tmp_path: Path) -> WriteCsv:
    """Writes columns as a text file and returns its path."""

    def write(columns: Columns, name: str = "log.csv", delimiter: str = ",", newline: str = "\n") -> Path:
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter, lineterminator=newline)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        return path

    return write
