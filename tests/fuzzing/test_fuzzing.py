"""Whatever bytes the program reads, it answers, or says in words what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing.targets import Target, targets

from dhen.errors import UserError

HERE = Path(__file__).parent
FOUND = sorted(HERE.glob("found/*/*"))
"""Inputs that once ended in a traceback, or would have written where they should not."""
INPUTS, TIMEOUT_SECONDS = 400, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzing")


@pytest.fixture(scope="module")
def every(folder: Path) -> dict[str, Target]:
    return targets(folder)


def test_good_inputs_are_read(every: dict[str, Target]) -> None:
    for target in every.values():
        for seed in target.seeds:
            target.read(seed)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_once_is_said_in_words(path: Path, every: dict[str, Target]) -> None:
    with pytest.raises(UserError):
        every[path.parent.name].read(path.read_bytes())


def test_varied_inputs_are_read_or_said_in_words(folder: Path, every: dict[str, Target]) -> None:
    words = ("--together", "--inputs", INPUTS, "--folder", folder)
    ended = subprocess.run(
        [sys.executable, HERE / "fuzz.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout
    assert f"together: Done {INPUTS} runs" in ended.stdout
