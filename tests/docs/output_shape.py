"""Whether an output that a document shows is one that was printed, but for what differs from run to run."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[-+±]?\d[\d,.]*(?:e[-+]?\d+)?")
MODEL = re.compile(r"(?:\d+x)?\[[\w+ ]+\](?: \w+)*|advanced_dlrm [\d-]+ d\d+(?: buckets \w+)?")
STATE = re.compile(r"\b(?:baseline|best|knee|front|completed)\b")


def missing_lines(shown: str, printed: str) -> list[str]:
    """Lines of a shown output whose shape was not printed; three dots stand for anything.

    Numbers, names of networks, what a trial of a table is (best, knee) and widths of columns may differ.
    """
    text = shape(printed)
    parts = ((line, shape(part)) for line in shown.splitlines() for part in re.split(r"\.\.\.|…", line))
    return [line for line, part in parts if part not in text]


def shape(text: str) -> str:
    """A text without what differs from run to run."""
    text = MODEL.sub("NETWORK", text)
    text = STATE.sub("STATE", text)
    text = re.sub(r"(?<![\w])(?:–|NaN)(?![\w])", "0", text)
    text = NUMBER.sub("0", text)
    text = re.sub(r"\b0( ?)(?:min 0 s|k|M|G|ms|s)\b", "0", text)
    return " ".join(text.split())
