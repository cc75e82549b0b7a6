"""Whatever starts a process sees to it that the process ends with its parent, however that one ends."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")
ENDS = {
    "trials/processes/launcher.py": ("trials/processes/worker.py", "end_with_parent("),
    "search/serving/workers.py": ("search/serving/worker.py", "target=_end_with_parent"),
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
