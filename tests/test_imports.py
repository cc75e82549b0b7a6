"""Imports run one way: dhen <- spaces, dhen <- trials; dashboards read records; search is the roof."""

from __future__ import annotations

import ast
import subprocess
import sys
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
DASHBOARDS_READ = ("trials.record",)
"""What of trials the dashboards may know: values, nothing that trains."""


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
    assert [path.relative_to(ROOT).as_posix() for path in users] in ([], ["trials/tracking.py"])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("search.cli", ("torch", "mlflow", "optuna", "pyarrow", "plotly")),
        ("trials.record", ("torch", "mlflow", "optuna")),
        ("trials.ledger", ("torch", "mlflow", "optuna")),
        ("trials.tracking", ("torch", "mlflow")),
        ("trials.data.prepare", ("torch", "mlflow")),
        ("dashboards.page", ("torch", "mlflow")),
        ("search.verbs.status", ("torch", "mlflow")),
    ],
)
def test_light_modules_stay_light(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
