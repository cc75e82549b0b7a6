"""`dhen-search ui` in a process of its own, as a shell would start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start(*words: object) -> subprocess.Popen[str]:
    """The command with these words; it opens no browser."""
    return subprocess.Popen(
        [sys.executable, "-c", "from search.cli import main; main()", "ui", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    """What it prints, up to the line that has these words."""
    said = ""
    for line in process.stdout:
        said += line
        if wanted in line:
            return said
    raise AssertionError(said)


def ended(process: subprocess.Popen[str]) -> None:
    """Ends it by Ctrl-C, which it answers with exit code 0."""
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    process.stdout.close()
