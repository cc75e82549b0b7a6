"""What the benchmarks share: the machine in words, tables in Markdown."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

TRAINING_FLOPS = 3
"""Forward passes that a training step is worth."""


def machine() -> str:
    """Processor, cores, memory, date: what every figure needs beside it."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    today = datetime.date.today().isoformat()
    name = models[0] if models else platform.processor()
    return f"{today}, {name}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
