"""The rules of the rooms: imports run one way, in no circle, as the lists here allow.

dhen <- spaces, dhen <- trials; dashboards read records; search is the roof.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
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
DASHBOARDS_READ = (
    "trials.records.trial_record",
    "trials.records.study_record",
    "trials.records.findings",
    "trials.planner.estimates",
)
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


FOLDERS = {
    "dhen.blocks": {"dhen.ops"},
    "dhen.ensembles": {"dhen.ops"},
    "dhen.inputs": {"dhen.ops"},
    "dhen.ops": set(),
    "trials.cluster": set(),
    "trials.records": {"trials.cluster"},
    "trials.store": {"trials.cluster", "trials.records"},
    "trials.data": {"trials.records", "trials.store"},
    "trials.optim": {"trials.cluster", "trials.records", "trials.store"},
    "trials.planner": {"trials.cluster", "trials.optim", "trials.records"},
    "trials.training": {
        *(
            "trials.cluster",
            "trials.data",
            "trials.optim",
            "trials.planner",
            "trials.records",
            "trials.store",
        ),
    },
    "trials.runtime": {
        *("trials.cluster", "trials.data", "trials.records", "trials.store", "trials.training"),
    },
    "dashboards.figures": set(),
    "dashboards.report": {"dashboards.figures", "dashboards.sentences"},
    "dashboards.sentences": set(),
    "dashboards.terminal": {"dashboards.sentences"},
    "search.samplers": set(),
    "search.execution": {"search.samplers"},
    "search.bundles": {"search.execution"},
    "search.mlflow": {"search.bundles"},
    "search.analysis": {"search.bundles", "search.execution", "search.samplers"},
    "search.study": {
        *("search.analysis", "search.bundles", "search.execution", "search.mlflow", "search.samplers"),
    },
    "search.live": {"search.mlflow"},
    "search.notebook": {"search.bundles", "search.execution", "search.study"},
    "search.serving": {"search.bundles"},
    "search.verbs": {
        *("search.analysis", "search.bundles", "search.execution", "search.live", "search.mlflow"),
        *("search.serving", "search.study"),
    },
}
"""Which folders of its own room a folder may import. The files directly in a room are what its folders share."""


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    names = {path: path.relative_to(ROOT).with_suffix("").parts for room in ROOMS for path in files_of(room)}
    return {".".join(name[:-1] if name[-1] == "__init__" else name): path for path, name in names.items()}


def ours_imported(path: Path, known: Collection[str]) -> set[str]:
    """Modules of ours that a file imports: also for type checkers only, and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(known)


def is_folder(place: str) -> bool:
    return (ROOT / place.replace(".", "/")).is_dir()


def test_a_folder_imports_of_its_room_what_the_list_allows() -> None:
    known = modules()
    folders = {place for place in (".".join(name.split(".")[:2]) for name in known) if "." in place}
    with_modules = {place for place in folders if is_folder(place)}
    assert {place for place in with_modules if place.split(".")[0] != "spaces"} == set(FOLDERS)
    for name, path in known.items():
        place = ".".join(name.split(".")[:2])
        if place not in FOLDERS:
            continue
        for module in ours_imported(path, known):
            other = ".".join(module.split(".")[:2])
            same_room = other.split(".")[0] == place.split(".")[0]
            if same_room and other != place and is_folder(other) and "." in other:
                assert other in FOLDERS[place], f"{path} imports {module}"


def test_folders_import_one_another_in_no_circle() -> None:
    """At every level: inside a room, a file directly in it counts alone; inside a folder the same holds again."""
    known = modules()
    for parent in sorted({name for name, path in known.items() if path.name == "__init__.py"}):
        needs: dict[str, set[str]] = {}
        for name, path in known.items():
            if not name.startswith(f"{parent}."):
                continue
            child = child_of(parent, name)
            inside = {child_of(parent, m) for m in ours_imported(path, known) if m.startswith(f"{parent}.")}
            needs.setdefault(child, set()).update(inside - {child})
        try:
            TopologicalSorter(needs).prepare()
        except CycleError as error:
            pytest.fail(f"a circle in {parent}: {' -> '.join(error.args[1])}")


def child_of(parent: str, module: str) -> str:
    """The file or folder directly in `parent` that a module lies in."""
    return module.removeprefix(f"{parent}.").split(".")[0]


def test_mlflow_is_imported_in_two_folders() -> None:
    users = {
        path.parent.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in files_of(room)
        if any(module.split(".")[0] == "mlflow" for module in imports_of(path))
    }
    assert users == {"search/live", "search/mlflow"}


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {path.parent.relative_to(ROOT) for room in ROOMS for path in files_of(room)}
    assert sorted(listed) == sorted(path.as_posix().replace("/", ".") for path in there)


HEAVY = ("torch", "mlflow", "optuna", "plotly", "pyarrow", "numpy")


LIGHT = (
    ("search", (*HEAVY, "pandas", "rich")),
    *(
        (module, HEAVY)
        for module in (
            "search.cli",
            "dhen.atomic_write",
            "trials.records.trial_record",
            "trials.store.ledger",
        )
    ),
    *((module, HEAVY) for module in ("trials.runtime.launcher", "search.mlflow.fill_in")),
    *((module, HEAVY) for module in ("dashboards.terminal.tables", "search.serving.workers")),
    *((f"search.verbs.{verb}", HEAVY) for verb in ("run", "status", "ui", "serve", "clusters")),
    *((words, HEAVY) for words in ("--help", "run --help", "status --help", "ui --help", "clusters")),
    *((f"search.verbs.{verb}", ("torch", "mlflow", "optuna")) for verb in ("prepare", "report")),
    ("search.live.app", ("torch", "mlflow", "optuna")),
    *(
        (module, ("torch", "mlflow"))
        for module in ("dashboards.report.page", "trials.data.prepare.prepare_log")
    ),
)
"""Modules, or words of the command line, and what they must not import; those that may import least come first."""
CODE = """
import importlib, sys
for name, absent in {light!r}:
    if name.startswith(("search", "dhen", "trials", "dashboards")):
        importlib.import_module(name)
    else:
        sys.modules["search.cli"].cli.main(name.split(), standalone_mode=False)
    found = [module for module in absent if module in sys.modules]
    if found:
        sys.exit(f"{{name}} imports {{found}}")
"""


@pytest.mark.parametrize("light", [LIGHT, [("search.config", ("mlflow", "plotly", "pyarrow"))]], ids=len)
def test_light_modules_help_and_lists_stay_light(light: object) -> None:
    code = CODE.format(light=light)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_values_are_changed_through_replace_alone() -> None:
    """Pydantic's `model_copy(update=...)` checks neither names nor types."""
    for room in (*ROOMS, "tests", "benchmarks"):
        for path in files_of(room):
            called = {
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert "model_copy" not in called, path
