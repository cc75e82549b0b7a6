"""Benchmarks as they are run from the command line, in this process or in one of their own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from command_line import TIMEOUT_SECONDS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
GUARD = 'if __name__ == "__main__":'
"""What makes a file a script."""


def scripts() -> list[str]:
    """All files that can be run, as `python -m` names them."""
    files = [path for path in sorted(FOLDER.rglob("*.py")) if GUARD in path.read_text()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]


def run_benchmark(module: str, *words: object) -> str:
    """What a script says on both streams; it runs here, which saves the imports, and must end well."""
    said = io.StringIO()
    before = torch.get_num_threads()
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)  # of packages that are not ours
            patch.setattr(sys, "argv", [module, *map(str, words)])
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                importlib.import_module(module).main()
    except SystemExit as ended:
        if ended.code:
            raise AssertionError(f"{ended.code}\n{said.getvalue()}") from None
    finally:
        torch.set_num_threads(before)
        signal.signal(signal.SIGTERM, terminate)
    return said.getvalue()


def run_benchmark_process(module: str, *words: object) -> str:
    """The same in a process of its own: for scripts that change the process they run in."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return f"{done.stderr}\n{done.stdout}"


Table = list[dict[str, str]]


def tables(said: str) -> list[Table]:
    """The Markdown tables in what was said, each a list of rows by column; no row is short of a cell."""
    found, rows = list[Table](), list[list[str]]()
    for line in [*said.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]])
            continue
        if len(rows) > 1 and all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]):
            header = [name if name not in rows[0][:i] else f"{name} ({i})" for i, name in enumerate(rows[0])]
            found.append([dict(zip(header, row, strict=True)) for row in rows[2:]])
        rows = []
    return found


def number(cell: str) -> float:
    """The first number in a cell."""
    found = re.search(r"[-+]?\d[\d,]*\.?\d*(e[-+]?\d+)?", cell)
    assert found, f"no number in {cell!r}"
    return float(found[0].replace(",", ""))
