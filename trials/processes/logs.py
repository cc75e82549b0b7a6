"""Logging of a rank: the standard library's `logging`, set up once in its process, into the rank's log file.

The driver's lines (`search.logs`) have the same form, but for the rank. A line tells of what happens a few times
in a training; nothing is logged per step.
"""

from __future__ import annotations

import logging
import re

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
ALL_IS_WELL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO) ")
"""Pattern of the beginning of a line in this format that explains no failure."""
ROOMS = ("dhen", "trials")
"""Packages whose lines a rank's log has; of other libraries it has warnings."""


def log_to_stderr(name: str, *, debug: bool) -> None:
    """Sets this process up as a rank or a server of that name: what modules log goes to stderr, and
    Python's warnings with it."""
    of_rank = FORMAT.replace("%(name)s", f"{name} %(name)s")
    # force: what an imported library has set up does not count
    logging.basicConfig(level=logging.WARNING, format=of_rank, datefmt=DATE_FORMAT, force=True)
    for name in ROOMS:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)
