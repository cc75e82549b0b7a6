"""Imports run one way: dhen <- spaces, dhen <- trials; dashboards read records; search is the roof."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")
ALLOWED = {
    "dhen": set(),
    "spaces": {"dhen"},
    "trials": {"dhen"},
    "dashboards": {"dhen", "trials"},
    "search": {"dhen", "spaces", "trials", "dashboards"},
}
DASHBOARDS_READ = ("trials.record", "trials.planner.estimates")
"""What of trials the dashboards may know: values, nothing that trains or plans."""


def imports_of(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_downwards_only(room: str) -> None:
    for path in files_of(room):
        for module in imports_of(path):
            top = module.split(".")[0]
            if top in ROOMS and top != room:
                assert top in ALLOWED[room], f"{path} imports {module}"


def test_dashboards_read_records_only() -> None:
    for path in files_of("dashboards"):
        for module in imports_of(path):
            assert not module.startswith("trials") or module in DASHBOARDS_READ, f"{path} imports {module}"


def test_mlflow_is_imported_in_one_file() -> None:
    users = [path for room in ROOMS for path in files_of(room) if "mlflow" in imports_of(path)]
    assert [path.relative_to(ROOT).as_posix() for path in users] in ([], ["trials/mlflow/tracker.py"])


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {path.parent.relative_to(ROOT) for room in ROOMS for path in files_of(room)}
    assert sorted(listed) == sorted(path.as_posix().replace("/", ".") for path in there)


HEAVY = ("torch", "mlflow", "optuna", "plotly", "pyarrow", "numpy")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("search.cli", HEAVY),
        ("trials.record", HEAVY),
        ("trials.storage.ledger", HEAVY),
        ("trials.processes.launcher", HEAVY),
        ("trials.mlflow.tracker", HEAVY),
        ("trials.data.prepare.prepare_log", ("torch", "mlflow")),
        ("dashboards.terminal.tables", HEAVY),
        ("dashboards.report.page", ("torch", "mlflow")),
        ("search.verbs.run", HEAVY),
        ("search.verbs.status", HEAVY),
        ("search.verbs.report", ("torch", "mlflow", "optuna")),
        ("search.verbs.ui", HEAVY),
        ("search.verbs.clusters", HEAVY),
    ],
)
def test_light_modules_stay_light(module: str, absent: tuple[str, ...]) -> None:
    assert imported(f"import {module}", absent) == []


def imported(code: str, modules: tuple[str, ...]) -> list[str]:
    """Which of the modules are there after the code, in a process of its own."""
    code = f"import sys\n{code}\nprint([m for m in {modules!r} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[str] = ast.literal_eval(output.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["status", "--help"], ["ui", "--help"], ["clusters"]]
)
def test_help_and_lists_need_nothing_heavy(words: list[str]) -> None:
    code = f"from search.cli import cli\ncli.main({words!r}, standalone_mode=False)"
    assert imported(code, HEAVY) == []


def test_values_are_changed_through_replace_alone() -> None:
    """Pydantic's `model_copy(update=...)` checks neither names nor types."""
    for room in (*ROOMS, "tests", "benchmarks"):
        for path in files_of(room):
            called = {
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert "model_copy" not in called, path
