"""A study inside a job of a real Slurm cluster, whose nodes are on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import processes
from command_line import COMMAND, ROOT, SMALL, TIMEOUT_SECONDS, Run
from servers.slurm import CPUS, slurm_cluster
from tools import needs

from search.read_study import read_study
from trials.records.trial_record import Outcome

EXAMPLE = ROOT / "examples" / "slurm.sbatch"
MARK = uuid.uuid4().hex
"""In the environment of all that jobs start."""
RUNS = re.compile("JobState=(PENDING|RUNNING|CONFIGURING|COMPLETING)")
pytestmark = needs("slurm")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with slurm_cluster() as environment:
        yield environment


def job(
    slurm: dict[str, str], environment: dict[str, str], nodes: int, folder: Path, *words: object
) -> tuple[int, str]:
    """Exit code and words of the example's job, once it has ended."""
    options = ("--parsable", f"--nodes={nodes}", f"--cpus-per-task={CPUS}", f"--output={folder / 'said'}")
    path = f"{COMMAND.parent}{os.pathsep}{environment.get('PATH', os.environ['PATH'])}"
    known = slurm | environment | {"SLURM_CONF": slurm["SLURM_CONF"], "PATH": path, processes.MARK: MARK}

    def ask(*command: object) -> str:
        return subprocess.run(
            [*map(str, command)], env=known, cwd=folder, capture_output=True, text=True, check=True
        ).stdout

    number = ask("sbatch", *options, EXAMPLE, *words).strip()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while RUNS.search(shown := ask("scontrol", "show", "job", number)):
        assert time.monotonic() < deadline, shown
        time.sleep(0.2)
    (code,) = re.findall(r" ExitCode=(\d+):", shown)
    return int(code), (folder / "said").read_text()


def test_a_study_trains_on_the_nodes_of_its_job(
    slurm: dict[str, str], environment: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    out = tmp_path / "study"
    words = ("--data", click_log, "--out", out, *SMALL, "trials=1", "confirm=no", "averages=0")
    code, said = job(slurm, environment, 2, tmp_path, *words, "ranks=2x1")
    assert code == 0, said
    assert said.count("takes part") == 2
    (trial,) = (trial for trial in read_study(out).trials if trial.number == 1)
    assert trial.result.outcome is Outcome.COMPLETED
    assert (out / "trials" / "00001" / "attempt0.rank1.log").exists()
    assert [left for left in processes.marked(MARK) if "ray start" in left.command] == []


@pytest.mark.slow
def test_a_job_of_too_few_nodes(
    slurm: dict[str, str], environment: dict[str, str], click_log: Path, tmp_path: Path
) -> None:
    words = ("--data", click_log, "--out", tmp_path / "study", "trials=1")
    code, said = job(slurm, environment, 1, tmp_path, *words, "ranks=2x1")
    assert code == 2, said
    assert "needs 2 node(s)" in said


def test_outside_of_a_job(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    words = ("run", "--data", click_log, "--out", tmp_path / "study", "trials=1", "launcher=slurm")
    assert "works inside one: `sbatch --nodes=2" in dhen_search(*words, code=2).stderr
