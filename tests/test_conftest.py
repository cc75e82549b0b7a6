"""A test that skips for a missing tool fails under CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="needs a tool")
def test_of_a_tool() -> None: ...

def test_that_runs() -> None: ...
"""


@pytest.mark.parametrize(
    ("ci", "code", "words"), [("true", 1, "needs a tool"), ("", 0, "1 passed, 1 skipped")]
)
def test_a_skip_fails_under_ci_alone(tmp_path: Path, ci: str, code: int, words: str) -> None:
    for name in ("conftest.py", "part_costs.json"):
        (tmp_path / name).write_text((Path(__file__).parent / name).read_text())
    (tmp_path / "test_tool.py").write_text(SKIPS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(tmp_path)],
        env=os.environ | {"CI": ci},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == code, ran.stdout
    assert words in ran.stdout
