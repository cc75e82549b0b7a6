"""A disk that is full, at any moment of a study: what is said, that nothing is lost, that the command goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.small_disk import SmallDisk
from command_line import SMALL, Run
from records import study as made_up
from rich.console import Console
from tools import find

from dhen.errors import UserError
from search.config import StudyConfig
from search.mlflow.fill_in import StudyRuns
from search.read_study import read_study
from trials.records.trial_record import Outcome
from trials.store.user_cache import DiskFullError, disk_full, is_disk_full

KIB = 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = SmallDisk(folder)
    yield disk
    disk.close()


@pytest.mark.parametrize(
    ("kib", "file"),
    [
        pytest.param(40, "study.db", marks=pytest.mark.slow),
        (300, ""),
        pytest.param(1000, "", marks=pytest.mark.slow),
    ],
    ids=["the ledger", "a rank", "the report"],
)
def test_a_study_on_a_full_disk_says_so_and_goes_on_once_there_is_space(
    environment: dict[str, str], click_log: Path, small_disk: SmallDisk, dhen_search: Run, kib: int, file: str
) -> None:
    dhen_search("prepare", click_log)
    small_disk.limit(kib * KIB)
    words = ("run", "--data", click_log, "--out", small_disk.folder / "study", "trials=1", *SMALL)
    done = small_disk.run(words, environment)
    assert done.returncode == 2, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    (line,) = done.stderr.splitlines()
    assert "MiB are free" in line
    assert "run the same command again" in line
    if find("mount"):  # later on, another thread or process may find the disk full first
        assert f"{small_disk.folder / 'study' / file}" in line
    small_disk.lift()
    dhen_search(*words)
    record = read_study(small_disk.folder / "study")
    assert record.finished
    assert [trial.result.outcome for trial in record.trials] == [Outcome.COMPLETED] * 2
    assert all(len(trial.attempts) == 1 for trial in record.trials if not trial.shared)


def test_mlflow_without_space_says_what_to_do_and_follows_later(tmp_path: Path) -> None:
    """A study warns of that and goes on (`search.study.report_writer`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    runs = StudyRuns(tmp_path, StudyConfig(), Console())
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * KIB, hard))
    try:
        with pytest.raises(UserError, match=r"mlflow.db.*MiB are free"):
            runs.fill_in(made_up(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    runs.fill_in(made_up(2))


CHECKPOINT = """
import resource, sys
from pathlib import Path
from faulty_ranks import real_training
from trials.runtime.launcher import Launcher
from trials.runtime.launcher import wait_for
folder, limit, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
task = real_training(folder).replace(
    resume_from=str(folder / "checkpoints"), checkpoint_seconds=0.0, gpus_per_host=ranks
)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
run = Launcher().start(task, folder)
events = []
while not run.ended:
    wait_for([run])
    events += run.new_events()
print(events[-1].model_dump_json())
"""


@pytest.mark.parametrize(
    ("largest_bytes", "ranks"),
    [
        pytest.param(20_000, 1, marks=pytest.mark.slow),
        (20_000, 2),
        pytest.param(1_000, 1, marks=pytest.mark.slow),
    ],
    ids=["a checkpoint", "a checkpoint of two ranks", "a log"],
)
def test_a_rank_without_space_says_so(tmp_path: Path, largest_bytes: int, ranks: int) -> None:
    """A limit on the size of files, as ranks inherit it from a fork server of the process's own."""
    words = [str(tmp_path / "trial"), str(largest_bytes), str(ranks)]
    done = subprocess.run(
        [sys.executable, "-c", CHECKPOINT, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"disk_full":true' in done.stdout
    assert f"{tmp_path}" in done.stdout


def test_libraries_say_it_in_words() -> None:
    error = ValueError("the weights")
    assert not is_disk_full(error)
    for text in ("No space left on device", "I/O error (os error 28)", "Disk quota exceeded"):
        error.__cause__ = RuntimeError(text)
        assert is_disk_full(error), text


def test_the_message_names_the_file_the_space_and_the_remedy(tmp_path: Path) -> None:
    error = disk_full(tmp_path / "new" / "file")
    assert isinstance(error, DiskFullError)
    assert str(error).startswith(f"{tmp_path / 'new' / 'file'}: no space to write it.")
    assert "MiB are free on its disk" in str(error)
    assert "run the same command again" in str(error)
