"""Whatever starts a process sees to it that the process ends with its parent, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from trials.profiling import processes

ROOT = Path(__file__).parents[2]
ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")
ENDS = {
    "trials/processes/launcher.py": ("trials/processes/worker.py", "end_with_parent("),
    "trials/profiling/processes.py": ("trials/profiling/processes.py", "end_with_parent("),
    "search/serving/workers.py": ("search/serving/worker.py", "target=_end_with_parent"),
    "search/live/start.py": ("search/live/start.py", "end_with_parent.__file__"),
    "search/live/end_with_parent.py": ("search/live/end_with_parent.py", "target=_end_with_parent"),
    "trials/hosts/slurm.py": ("trials/hosts/slurm.py", "srun"),  # Slurm ends the steps of a job with it
}
"""Of each file that starts processes: the file that has them end with their parent, and by which words."""


def test_every_place_that_starts_processes_is_known() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    starts = ("Popen(", ".Process(", "os.fork(", "posix_spawn", "ProcessPool", "os.spawn")
    assert {name for name, text in sources.items() if any(word in text for word in starts)} == ENDS.keys()
    assert [name for name, (file, words) in ENDS.items() if words not in sources[file]] == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_measures_ends_with_a_killed_driver(tmp_path: Path) -> None:
    measures = tmp_path / "measures"
    partial = measures.with_suffix(".partial")
    measure = (
        f"import os, time; open({str(partial)!r}, 'w').write(str(os.getpid()));"
        f"os.rename({str(partial)!r}, {str(measures)!r}); time.sleep(600)"
    )
    code = f"from {processes.__name__} import _measuring\nwith _measuring(exec, ({measure!r},)) as end: end.recv()"
    with subprocess.Popen([sys.executable, "-c", code]) as driver:
        while not measures.exists():
            assert driver.poll() is None
            time.sleep(0.05)
        process = Path("/proc") / measures.read_text()
        assert process.exists()
        os.kill(driver.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    with suppress(FileNotFoundError, ProcessLookupError):
        while ") Z " not in (process / "stat").read_text():
            assert time.monotonic() < deadline, "it measures on"
            time.sleep(0.05)
