"""`docs/promises.md` names tests that exist, and says of each promise what would fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w./-]+\.py)::(\w+)`", PAGE)))


def rows() -> list[list[str]]:
    """Cells of all tables, without the heads."""
    lines = re.findall(r"^\| (?!---)(.+) \|$", PAGE, re.MULTILINE)
    return [
        line.split(" | ")
        for line in lines
        if "what would fail" not in line and "test that failed" not in line
    ]


def test_every_row_says_what_would_fail_or_that_nothing_would() -> None:
    assert len(rows()) > 50
    for promise, *said in rows():
        (answer,) = said
        assert re.search(r"\.py::\w+`|no test|^benchmark: \[", answer), promise


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_what_is_written_as_a_test_is_read_as_one() -> None:
    """A name that the pattern above does not match would be looked up nowhere."""
    assert len(re.findall("::", PAGE)) == len(re.findall(r"`[\w./-]+\.py::\w+`", PAGE)) + PAGE.count(
        "`path::name`"
    )
