"""Processes that die without a word, several at once, and what the fork server is started with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from faulty_ranks import everything, real_training, trained

from trials.records.events import EVENTS, EventWriter, FailureEvent, Progress, RankLogs
from trials.runtime.fork_server import ALLOCATOR_VARIABLES, SERVER_ENVIRONMENT, server_environment
from trials.runtime.launcher import Launcher, Run, wait_for
from trials.runtime.rank_process import LocalRank


def die(folder: str) -> None:
    """Says something, and is killed in the middle of a line."""
    with EventWriter(Path(folder) / EVENTS) as emit:
        emit(Progress(examples=1, total_examples=2, seconds=0.1))
    with (Path(folder) / EVENTS).open("a") as file:
        file.write('{"event": "progr')
    (Path(folder) / "attempt0.rank0.log").write_text("first\nlast words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def end_well(folder: str) -> None:
    with EventWriter(Path(folder) / EVENTS) as emit:
        emit(trained())


def wait_long(folder: str) -> None:
    (Path(folder) / "there").touch()
    time.sleep(600)


def run(target: Callable[[str], None], folder: Path, **settings: float) -> Run:
    folder.mkdir()
    Launcher()  # tells the fork server, which is one for all, what to import
    process = get_context("forkserver").Process(target=target, args=(str(folder),), daemon=True)
    process.start()
    return Run({0: LocalRank(process)}, RankLogs(folder, "attempt0"), **settings)


def test_a_death_without_a_word_is_told(tmp_path: Path) -> None:
    first, death = everything(run(die, tmp_path / "a"))
    assert isinstance(first, Progress)
    assert isinstance(death, FailureEvent)
    assert death.killed
    assert not death.out_of_memory
    assert "killed by signal 9" in death.error
    assert "attempt0.rank0.log ends: first | last words" in death.error


def test_one_that_ends_does_not_wait_for_its_neighbour(tmp_path: Path) -> None:
    stays, ends = run(wait_long, tmp_path / "a"), run(end_well, tmp_path / "b")
    events: list[object] = []
    while not ends.ended:
        wait_for([stays, ends])
        events += ends.new_events()
        assert stays.new_events() == []
    assert events == [trained()]
    assert ends.new_events() == []
    assert not stays.ended
    stays.kill()
    (death,) = everything(stays)
    assert isinstance(death, FailureEvent)


def test_a_driver_that_looks_away_is_no_evidence_of_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trials.runtime.launcher.LONGEST_LOOK_SECONDS", 0.01)
    each = run(wait_long, tmp_path / "a", deadline_seconds=0.5)
    while not (tmp_path / "a" / "there").exists():
        time.sleep(0.01)
    time.sleep(1.0)
    assert each.new_events() == []
    monkeypatch.undo()
    time.sleep(1.0)
    (hang,) = each.new_events()
    assert isinstance(hang, FailureEvent)
    assert "no progress" in hang.error
    assert each.ended


def test_the_servers_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with server_environment():
        assert SERVER_ENVIRONMENT.items() <= os.environ.items()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "PYTHONSAFEPATH" not in os.environ


def test_trainings_side_by_side_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine only says that it has two GPUs; what a rank does with its own is up to its process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    task, launcher, runs = real_training(tmp_path / "log", rows=600), Launcher(), list[Run]()

    def device(number: int) -> str | None:
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(launcher.start(task, folder))
        (rank,) = runs[-1]._processes.values()
        assert isinstance(rank, LocalRank)
        return rank.device

    try:
        assert [device(number) for number in range(3)] == ["4", "7", "4"]
        runs[1].kill()
        assert device(3) == "7"
    finally:
        for each in runs:
            each.kill()


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_segments_of_memory_expand_unless_the_user_has_said_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    with server_environment():
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:512")
    with server_environment():
        assert {each: os.environ[each] for each in ALLOCATOR_VARIABLES if each in os.environ} == {
            name: "max_split_size_mb:512"
        }
