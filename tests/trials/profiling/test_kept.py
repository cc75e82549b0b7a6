"""Costs of parts are kept where that is possible, and one command measures at a time."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import KEPT, SHARED

from trials.cluster.machine import Precision
from trials.cluster.part_costs import PartCosts
from trials.cluster.shared_costs import SharedCosts
from trials.data.prepare.locked_directory import locked
from trials.profiling import kept, processes
from trials.profiling.on_ranks import SharedMeasured, SharedSetting
from trials.profiling.processes import Say

Measured = list[int]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """Nothing is kept yet; each measurement, which is known here, leaves its number of processes."""
    found: Measured = []

    def measure(
        precision: Precision, say: Say, *, threads: int, processes: int, until: float = math.inf
    ) -> PartCosts:
        found.append(processes)
        return KEPT.replace(precision=precision, threads=threads, processes=processes)

    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "measured_costs", measure)
    return found


def costs(say: Callable[[str], None] = lambda _: None) -> PartCosts:
    found = kept.part_costs("fp32", threads=1, processes=3, say=say)
    assert found is not None
    return found


def test_what_was_measured_is_kept(measured: Measured) -> None:
    assert costs() == costs() == KEPT.replace(precision="fp32", threads=1, processes=3)
    assert measured == [3]


def test_ranks_that_share_a_training_are_measured_once_for_each_setting(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SharedSetting] = []

    def measure(setting: SharedSetting, say: Say, *, until: float) -> list[SharedMeasured]:
        asked.append(setting)
        return []

    monkeypatch.setattr(kept, "measured_on_ranks", measure)
    monkeypatch.setattr(kept, "shared_costs_of", lambda _, setting: shared_by(setting))
    two, four = SharedSetting("fp32", 1, 1, 2, False), SharedSetting("fp32", 1, 2, 2, False)
    counted = four._replace(counted=True)
    said: list[str] = []
    for setting in (two, two, four, counted, four):
        assert kept.shared_costs(setting, said.append) == shared_by(setting)
    assert asked == [two, four, counted]
    assert len(said) == 3
    assert "2 ranks of one training" in said[0]
    assert "memory counted" in said[2]
    assert measured == []


def shared_by(setting: SharedSetting) -> SharedCosts:
    assert SHARED is not None
    return SHARED.replace(ranks=f"{setting.hosts}x{setting.gpus_per_host}", counted=setting.counted)


def test_a_new_module_has_parts_measured_again(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    costs()
    monkeypatch.setitem(kept.BLOCKS, "mine", kept.BLOCKS["mlp"])
    costs()
    assert measured == [3, 3]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"], ids=["empty", "other", "no text"])
def test_a_file_that_cannot_be_read_is_measured_anew(measured: Measured, content: bytes) -> None:
    path = kept.kept_at("fp32", 1, 3)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert costs() == costs()
    assert measured == [3]


def test_a_cache_that_cannot_be_written_ends_nothing(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "file"))
    said: list[str] = []
    assert costs(said.append).processes == 3
    (line,) = said
    assert f"not kept, as {tmp_path / 'file'}" in line
    assert "$DHEN_SEARCH_CACHE names another place" in line


def test_a_full_disk_ends_nothing(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "write_atomically", full)
    said: list[str] = []
    assert costs(said.append).processes == 3
    assert "was not written (No space left on device)" in said[-1]


def test_of_two_commands_one_measures_and_both_have_it(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_it, go_on, quickly = threading.Event(), threading.Event(), kept.measured_costs

    def slowly(
        precision: Precision, say: Say, *, threads: int, processes: int, until: float = math.inf
    ) -> PartCosts:
        at_it.set()
        assert go_on.wait(60)
        return quickly(precision, say, threads=threads, processes=processes)

    monkeypatch.setattr(kept, "measured_costs", slowly)
    found: list[PartCosts] = []
    both = [threading.Thread(target=lambda: found.append(costs())) for _ in range(2)]
    both[0].start()
    assert at_it.wait(60)
    both[1].start()
    both[1].join(0.3)
    assert both[1].is_alive()  # it waits for what the other one measures
    go_on.set()
    for thread in both:
        thread.join(60)
    assert len(found) == 2
    assert found[0] == found[1]
    assert measured == [3]


def test_a_long_measurement_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SAY_SECONDS", 0.2)
    said: list[str] = []
    assert processes._at_once(time.sleep, [(0.1,), (1.0,)], said.append) == [None, None]
    assert said
    assert all(line.startswith("... measuring, after ") for line in said)


def within(seconds: float, said: list[str]) -> PartCosts | None:
    return kept.part_costs("fp32", threads=1, processes=2, say=said.append, until=time.monotonic() + seconds)


def test_with_too_little_time_nothing_is_measured_but_what_is_kept_serves(measured: Measured) -> None:
    said: list[str] = []
    assert within(kept.LEAST_SECONDS - 1, said) is None
    assert measured == []
    (line,) = said
    assert line.startswith("Not measuring what parts of models take on this CPU (fp32, 2 processes at once)")
    assert "that takes 25 s or more, and the minutes leave 24 s for it" in line
    found = within(kept.LEAST_SECONDS + 1, said)
    assert found is not None
    assert measured == [2]
    assert within(-1.0, []) == found


def test_a_measurement_that_takes_too_long_is_given_up_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "LEAST_SECONDS", 0.1)
    said: list[str] = []
    assert within(0.5, said) is None
    assert said[0].startswith("Measuring what parts")
    assert said[-1].startswith("Measuring was given up after 0 s, which is what the minutes leave for it.")
    assert multiprocessing.active_children() == []
    assert not list(tmp_path.rglob("*.json"))


def test_another_command_that_measures_is_not_waited_for_longer(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LEAST_SECONDS", 0.1)
    said: list[str] = []
    with locked(kept.kept_at("fp32", 1, 2).parent), ThreadPoolExecutor() as pool:
        assert pool.submit(within, 0.5, said).result(20) is None
    assert measured == []
    assert said[-1].startswith("Measuring was given up")
