"""The command of a scene, in which silent ranks count as hanging after some seconds: `early_hang.py SECONDS
WORDS...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    seconds = float(sys.argv.pop(1))

    from search.execution import attempts

    attempts.DEADLINE_SECONDS = seconds

    early_checkpoints = Path(__file__).parents[1] / "early_checkpoints.py"
    runpy.run_path(str(early_checkpoints), run_name="__main__")
