"""A program without `if __name__ == "__main__"` is not run again by the processes that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MEASURES = """
import math
from trials.profiling.processes import _at_once

print("the program")
print(_at_once(math.sqrt, [(4.0,), (9.0,)], print))
"""


def test_processes_that_measure_do_not_run_a_plain_program_again(tmp_path: Path) -> None:
    program = tmp_path / "plain.py"
    program.write_text(MEASURES)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the program", "[2.0, 3.0]"]
