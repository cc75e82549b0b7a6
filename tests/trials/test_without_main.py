"""A program without `if __name__ == "__main__"` is not run again by the processes that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STARTS = """
from multiprocessing import get_context
from trials.runtime.fork_server import without_main

print("the program", flush=True)
with without_main():
    process = get_context("spawn").Process(target=print, args=("its process",))
    process.start()
process.join()
"""


def test_processes_do_not_run_a_plain_program_again(tmp_path: Path) -> None:
    program = tmp_path / "plain.py"
    program.write_text(STARTS)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the program", "its process"]
