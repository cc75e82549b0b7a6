"""What the README promises of `make`, by the commands that its targets would run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def last_command(*words: str) -> list[str]:
    """Of those that `make` would run where nothing is set up, after those that set everything up."""
    # without what a `make` that runs the tests has told its own
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(
        ["make", "-n", "VENV=/nowhere", *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=alone,
    ).stdout
    commands = shown.replace("\\\n", " ").splitlines()
    assert "-m venv /nowhere" in commands[0]
    assert "pip install" in commands[1]
    return commands[-1].split()


def test_two_commands_set_up_search_and_test() -> None:
    command = "/nowhere/bin/dhen-search"
    assert last_command("search") == [command, "run", "trials=20", "minutes=7", "demo.rows=100000"]
    own = last_command("search", "DATA=log.csv", "OUT=runs/x", "ARGS=trials=50 space=wide")
    assert own == [command, "run", "--data", "log.csv", "--out", "runs/x", "trials=50", "space=wide"]
    one_thread = "OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive"
    tested = f"{one_thread} /nowhere/bin/python -m pytest -n {{}} --dist loadfile --no-loadscope-reorder"
    assert last_command("test") == tested.format(2).split()
    assert last_command("test-all", "WORKERS=4") == [*tested.format(4).split(), "-m", '""']
    assert {command, "run", "space=techniques", "ranks=2x2"} <= set(last_command("techniques"))
