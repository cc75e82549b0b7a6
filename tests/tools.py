"""Programs and packages that some tests need and a machine may lack. `find` alone decides whether one is there.

A test names what it needs (`@needs("chromium")`) and skips at once if that is missing. Whatever starts a tool gets
it from `tool`, so a test that forgot to name it skips too. `DHEN_SEARCH_HIDE_TOOLS`, names separated by commas or
`all`, hides tools that are there: so any machine can show what a bare one does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

HIDE = "DHEN_SEARCH_HIDE_TOOLS"
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
POSTGRES = "postgres"
"""The user of Debian's package, whom root becomes to start the server, which refuses to be root."""
MOUNTS = 21
"""Number of the capability to mount (CAP_SYS_ADMIN)."""


class Tool(NamedTuple):
    words: str
    """What it is, and where to get it."""
    place: Callable[[], str | None]
    """Where it is: a program, a folder of them, or a package's file; None if it is missing."""


def program(*names: str) -> str | None:
    """The first of these programs that is here; some servers lie outside the path of everyone but root."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def package(*names: str) -> str | None:
    """The file of the first of these packages, if all are installed."""
    specs = [find_spec(name) for name in names]
    return specs[0].origin if specs[0] is not None and None not in specs else None


def _postgresql() -> str | None:
    """The folder with `initdb` and `pg_ctl` of the newest version; Debian has them outside the path."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    initdb = versions[-1] if versions else program("initdb")
    users = {line.partition(":")[0] for line in Path("/etc/passwd").read_text().splitlines()}
    may_start = os.geteuid() != 0 or (program("runuser") and POSTGRES in users)
    return str(Path(initdb).resolve().parent) if initdb and may_start and package("psycopg") else None


def _slurm() -> str | None:
    return program("slurmctld") if os.geteuid() == 0 and all(map(program, SLURM)) else None


def _mount() -> str | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    capabilities = int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)
    return program("mount") if capabilities >> MOUNTS & 1 else None


TOOLS = {
    "chromium": Tool("Chromium", lambda: program("chromium", "chromium-browser", "google-chrome")),
    "axe": Tool("axe-playwright-python (`make setup`)", lambda: package("axe_playwright_python")),
    "postgresql": Tool("PostgreSQL's server and psycopg, for root also the user postgres", _postgresql),
    "wrk": Tool("wrk", lambda: program("wrk")),
    "slurm": Tool(f"Slurm ({', '.join(SLURM)}) and root", _slurm),
    "gcc": Tool("gcc", lambda: program("gcc")),
    "g++": Tool("g++ or clang++", lambda: program("g++", "clang++")),
    "mount": Tool("the right to mount a small disk", _mount),
    "ray": Tool("Ray (pip install 'dhen-search[ray]')", lambda: package("ray", "grpc")),
    "torchrec": Tool("TorchRec (`make setup`)", lambda: package("torchrec")),
}


def find(name: str) -> str | None:
    """Where a tool is; None if it is missing or hidden."""
    hidden = os.environ.get(HIDE, "").split(",")
    return None if name in hidden or "all" in hidden else TOOLS[name].place()


def tool(name: str) -> str:
    """Where a tool is; skips the test if it is missing or hidden."""
    place = find(name)
    if place is None:
        pytest.skip(f"needs {TOOLS[name].words}")
    return place


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks tests that skip if one of these tools is missing, before anything is made for them (`conftest.py`)."""
    unknown = set(names) - TOOLS.keys()
    assert not unknown, f"no tools: {unknown}"
    return pytest.mark.tool(*names)
