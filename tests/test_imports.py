"""The rules of the rooms: imports run one way, in no circle, as the lists here allow; no folder is overfull.

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
    "trials.record",
    "trials.ordered_axis",
    "trials.study_record",
    "trials.analyses",
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
            # the web app serves what `search/mlflow/` writes, and is to stand beside `ui`
            if top in ROOMS and top != room and path != ROOT / "trials/mlflow/web_app.py":
                assert top in ALLOWED[room], f"{path} imports {module}"


def test_dashboards_read_records_only() -> None:
    for path in files_of("dashboards"):
        for module in imports_of(path):
            assert not module.startswith("trials") or module in DASHBOARDS_READ, f"{path} imports {module}"


FOLDERS = {
    "dhen.blocks": {"dhen.memory", "dhen.ops"},
    "dhen.ensembles": {"dhen.memory", "dhen.ops"},
    "dhen.inputs": {"dhen.memory", "dhen.ops"},
    "dhen.memory": set(),
    "dhen.ops": {"dhen.memory"},
    "trials.checkpoint": {"trials.embeddings", "trials.memory", "trials.storage"},
    "trials.cluster": set(),
    "trials.data": set(),
    "trials.distributed": {
        *("trials.checkpoint", "trials.memory", "trials.optim", "trials.planner", "trials.storage"),
    },
    "trials.embeddings": {"trials.memory", "trials.optim", "trials.planner"},
    "trials.hosts": {"trials.data", "trials.processes"},
    "trials.memory": {"trials.cluster"},
    "trials.mlflow": set(),
    "trials.optim": {"trials.cluster", "trials.storage"},
    "trials.planner": {"trials.cluster", "trials.memory", "trials.optim"},
    "trials.processes": {
        *("trials.checkpoint", "trials.cluster", "trials.data", "trials.distributed", "trials.memory"),
        *("trials.servers", "trials.storage", "trials.training"),
    },
    "trials.reference": {"trials.distributed", "trials.memory", "trials.optim", "trials.planner"},
    "trials.servers": {
        *(
            "trials.checkpoint",
            "trials.data",
            "trials.distributed",
            "trials.embeddings",
            "trials.memory",
            "trials.optim",
            "trials.storage",
        ),
    },
    "trials.storage": set(),
    "trials.training": {
        *("trials.checkpoint", "trials.cluster", "trials.data", "trials.distributed", "trials.embeddings"),
        *("trials.memory", "trials.optim", "trials.planner", "trials.servers", "trials.storage"),
    },
    "dashboards.figures": set(),
    "dashboards.report": {"dashboards.figures", "dashboards.sentences"},
    "dashboards.sentences": set(),
    "dashboards.terminal": {"dashboards.sentences"},
    "search.analysis": {
        *("search.bundles", "search.execution", "search.growth", "search.planning", "search.samplers"),
    },
    "search.averages": {"search.budget", "search.execution", "search.planning"},
    "search.budget": {"search.execution", "search.planning"},
    "search.bundles": {"search.execution"},
    "search.drivers": {
        *("search.execution", "search.growth", "search.planning", "search.reuse", "search.samplers"),
    },
    "search.execution": {"search.planning"},
    "search.growth": {"search.execution", "search.planning"},
    "search.http": set(),
    "search.live": {"search.http", "search.mlflow"},
    "search.mlflow": {"search.bundles"},
    "search.notebook": {"search.budget", "search.bundles", "search.planning", "search.study"},
    "search.online": {"search.bundles"},
    "search.optuna": {"search.growth"},
    "search.planning": {"search.samplers"},
    "search.proposals": {"search.execution", "search.planning"},
    "search.reuse": {"search.execution", "search.samplers"},
    "search.samplers": set(),
    "search.serving": {"search.bundles", "search.http"},
    "search.stopping": set(),
    "search.study": {
        *("search.analysis", "search.averages", "search.budget", "search.bundles", "search.drivers"),
        *(
            "search.execution",
            "search.growth",
            "search.mlflow",
            "search.optuna",
            "search.planning",
            "search.proposals",
            "search.reuse",
            "search.samplers",
            "search.stopping",
        ),
    },
    "search.verbs": {
        *("search.analysis", "search.budget", "search.bundles", "search.drivers", "search.execution"),
        *("search.http", "search.live", "search.mlflow", "search.online", "search.optuna", "search.planning"),
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


def test_the_root_holds_the_rooms() -> None:
    """What is imported lies in a room, so that five generic names swallow no other package."""
    loose = [path.name for path in ROOT.glob("*.py")]
    assert loose == []


def test_mlflow_is_imported_in_two_folders() -> None:
    users = {
        path.parent.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in files_of(room)
        if any(module.split(".")[0] == "mlflow" for module in imports_of(path))
    }
    assert users == {"search/mlflow", "trials/mlflow"}


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {path.parent.relative_to(ROOT) for room in ROOMS for path in files_of(room)}
    assert sorted(listed) == sorted(path.as_posix().replace("/", ".") for path in there)


HEAVY = ("torch", "mlflow", "optuna", "plotly", "pyarrow", "numpy")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("search.cli", HEAVY),
        ("dhen.atomic_write", HEAVY),
        ("trials.record", HEAVY),
        ("trials.storage.ledger", HEAVY),
        ("trials.processes.launcher", HEAVY),
        ("search.mlflow.fill_in", HEAVY),
        ("trials.data.prepare.prepare_log", ("torch", "mlflow")),
        ("dashboards.terminal.tables", HEAVY),
        ("dashboards.report.page", ("torch", "mlflow")),
        ("search.verbs.run", HEAVY),
        ("search.verbs.prepare", ("torch", "mlflow", "optuna")),
        ("search.verbs.status", HEAVY),
        ("search.verbs.report", ("torch", "mlflow", "optuna")),
        ("search.verbs.ui", HEAVY),
        ("search.verbs.serve", HEAVY),
        ("search.serving.workers", HEAVY),
        ("search.verbs.clusters", HEAVY),
        ("search.config", ("mlflow", "plotly", "pyarrow")),
        ("search", (*HEAVY, "pandas", "rich")),
        ("search.live.sources", HEAVY),
        ("search.live.app", ("torch", "mlflow", "optuna")),
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
