"""What the benchmarks share: the machine in words, means with their deviations, tables in Markdown."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence

from trials.cluster.machine import processor_name

TRAINING_FLOPS = 3
"""Forward passes that a training step is worth."""


def machine() -> str:
    """Processor, cores, memory, date: what every figure needs beside it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    today = datetime.date.today().isoformat()
    return f"{today}, {processor_name()}, {memory:.0f} GiB, Python {platform.python_version()}"


def spread(values: Sequence[float], digits: int = 5, unit: str = "") -> str:
    """Mean and standard deviation; 0 of a single value."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}{unit}"


def beside(nes: Sequence[float], reference: Sequence[float]) -> str:
    """How far NE is from a reference's in percent, in pairs of one seed each: mean and its standard error."""
    percent = [100 * (ne / other - 1) for ne, other in zip(nes, reference, strict=True)]
    return f"{statistics.mean(percent):+.2f} ± {statistics.stdev(percent) / len(percent) ** 0.5:.2f} %"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; a bar in a cell is escaped."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(header), *lines[1:]])
