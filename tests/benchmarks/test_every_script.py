"""No benchmark is left out: each is imported, answers `--help`, is listed, and has a test that runs it."""

from __future__ import annotations

import importlib
import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running_benchmarks import FOLDER, ROOT, run_benchmark, scripts

PARTS = {
    "benchmarks.drivers.one_driver": "benchmarks/drivers/many_drivers.py",
    "benchmarks.processes.rank_start_job": "benchmarks/processes/rank_start_time.py",
    "benchmarks.training.peers.plain_pytorch": "benchmarks/training/beside_peers.py",
    "benchmarks.training.peers.fuxictr_contestant": "benchmarks/training/beside_peers.py",
}
"""Scripts that another script runs, and which."""
ELSEWHERE = "benchmarks.training.peers.fuxictr_contestant"
"""It runs in an environment of its own, whose packages are not here."""
WITHOUT_WORDS = "benchmarks.search.candidate_walk"
"""It takes none."""
BY_THEMSELVES = [name for name in scripts() if name not in PARTS]


def modules() -> list[str]:
    files = sorted(path for path in FOLDER.rglob("*.py") if path.name != "__init__.py")
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]


def run_by_tests() -> set[str]:
    """Scripts that a test in this folder runs with words of its own: they begin a string."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    return {name for text in texts for name in re.findall(r'"(benchmarks\.[\w.]+)[ "]', text)}


def test_each_script_has_a_test_that_runs_it() -> None:
    assert run_by_tests() == set(BY_THEMSELVES)


def test_each_script_is_in_the_table() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [name for name in BY_THEMSELVES if f"python -m {name}" not in text] == []


@pytest.mark.parametrize("name", PARTS)
def test_a_script_that_another_runs_is_named_there(name: str) -> None:
    assert name.rpartition(".")[2] in (ROOT / PARTS[name]).read_text()


@pytest.mark.parametrize("name", [each for each in modules() if each != ELSEWHERE])
def test_all_can_be_imported_and_the_help_of_scripts_says_what_they_measure(name: str) -> None:
    document = importlib.import_module(name).__doc__
    if name in BY_THEMSELVES and name != WITHOUT_WORDS:
        assert document
        said = " ".join(run_benchmark(name, "--help").split())
        assert " ".join(document.split("\n\n")[0].split()) in said


def test_the_peer_whose_packages_are_elsewhere_is_python(tmp_path: Path) -> None:
    path = ROOT / f"{ELSEWHERE.replace('.', '/')}.py"
    py_compile.compile(str(path), str(tmp_path / "compiled"), doraise=True)


def test_what_peers_share_needs_the_standard_library_alone() -> None:
    """A peer's environment has neither this project's packages nor itself installed."""
    code = "import benchmarks.training.peers.contest; print({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"
