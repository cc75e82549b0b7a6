"""The wheel: it has every file that the program reads, and what is installed from it alone runs migrations.

It is built by the project's own build backend in a copy of the repository, and unpacked as `pip` would; nothing
comes from the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("dhen", "spaces", "trials", "search", "dashboards")
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
USE = """
import sys
import sqlalchemy as sa
from trials.store.ledger import Ledger
from trials.store.database import MIGRATIONS, migrate
with sa.create_engine(sys.argv[1]).begin() as connection:
    migrate(connection)
print(MIGRATIONS, Ledger(sys.argv[1], "ads").trials())
import dashboards.report.page
import spaces.space
import trials.cluster.this_machine
print(len(spaces.space.catalog()), len(trials.cluster.this_machine.catalog()), dashboards.report.page.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_every_file_of_the_rooms_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if name.split("/")[0] in ROOMS}
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert there == wanted
    for name in ("spaces/catalog/default.yaml", "dashboards/report/templates/report.html"):
        assert name in there
    assert "trials/store/migrations/versions/v0005_first_tables.py" in there


def test_what_is_installed_has_the_command_runs_migrations_and_reads_what_it_ships(
    wheel: Path, tmp_path: Path
) -> None:
    """Python finds the installed files before those of the repository."""
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (words,) = installed.glob("dhen_search-*.dist-info/entry_points.txt")
    assert "dhen-search = search.cli:main" in words.read_text()
    done = subprocess.run(
        [sys.executable, "-P", "-c", USE, f"sqlite:///{tmp_path / 'study.db'}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    migrations, trials, spaces, clusters, page = done.stdout.split()
    assert (migrations, trials) == (str(installed / "trials" / "store" / "migrations"), "[]")
    assert int(spaces) == len(list((ROOT / "spaces" / "catalog").glob("*.yaml")))
    assert int(clusters) == len(list((ROOT / "trials" / "cluster" / "catalog").glob("*.yaml")))
    assert page.startswith(str(installed))
