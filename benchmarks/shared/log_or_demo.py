"""The log that a benchmark is given, or the demo log."""

from __future__ import annotations

from collections.abc import Sequence

from search.dataset import open_log
from search.log_config import DEMO, DemoConfig, LogConfig
from trials.data.prepared_log import PreparedLog


def log_or_demo(names: Sequence[str], rows: int) -> PreparedLog:
    """Returns the log in these files; with no names, or `demo`, the demo log of so many rows."""
    if tuple(names) in ((), (DEMO,)):
        return open_log(LogConfig(demo=DemoConfig(rows=rows)))
    return open_log(LogConfig(data=tuple(names)))
