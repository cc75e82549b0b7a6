"""A test that skips for a missing tool fails under CI; hidden tools are missing, and tests ask `tools` alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import HIDE, TOOLS, Tool, find

TESTS = Path(__file__).parent
ASKS = re.compile(
    r"shutil\.which|find_spec|importorskip|pytest\.skip\(|/usr/lib/postgresql|skipif\((?!sys\.platform)"
)
"""Ways to ask whether something is installed, which only `tools.py` may use."""
SKIPS = """
import pytest
from tools import needs, tool

@pytest.fixture
def costly() -> None:
    raise AssertionError("made for a test that skips")

@needs("gcc")
def test_of_a_tool(costly: None) -> None: ...

def test_that_names_none() -> None:
    tool("wrk")

def test_that_runs() -> None: ...
"""


@pytest.mark.parametrize(("ci", "code", "words"), [("true", 1, "needs gcc"), ("", 0, "1 passed, 2 skipped")])
def test_a_skip_fails_under_ci_alone(tmp_path: Path, ci: str, code: int, words: str) -> None:
    for name in ("conftest.py", "tools.py"):
        (tmp_path / name).write_text((TESTS / name).read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = tool\n")
    (tmp_path / "test_tool.py").write_text(SKIPS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--strict-markers", "--rootdir", str(tmp_path), str(tmp_path)],
        env=os.environ | {"CI": ci, HIDE: "gcc,wrk"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == code, ran.stdout
    assert words in ran.stdout


def test_hidden_tools_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOLS, "python", Tool("Python", lambda: sys.executable))
    monkeypatch.setenv(HIDE, "wrk")
    assert find("python") == sys.executable
    monkeypatch.setenv(HIDE, "wrk,python")
    assert find("python") is None
    monkeypatch.setenv(HIDE, "all")
    assert [name for name in TOOLS if find(name)] == []


def test_tests_ask_for_tools_in_one_place() -> None:
    asking = {path.name for path in TESTS.rglob("*.py") if ASKS.search(path.read_text())}
    assert asking - {"tools.py", Path(__file__).name} == set(), "use needs() or tool() of tests/tools.py"
