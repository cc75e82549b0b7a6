"""Benchmarks of what people look at, on small cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_benchmarks import number, run_benchmark, tables
from tools import needs


@pytest.mark.slow
@needs("chromium")
def test_a_report_is_made_larger_and_opened(study: Path) -> None:
    words = (study, "--candidates", 20, "--points", 30, "--repeats", 1)
    (rows,) = tables(run_benchmark("benchmarks.dashboards.report_at_scale", *words))
    (row,) = rows
    assert (row["candidates"], row["points"]) == ("20", "30")
    assert 1 < number(row["size"].removesuffix(" MiB")) < 10
    assert number(row["ready in, ms"]) > 0
