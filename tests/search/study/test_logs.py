"""The log of a rank that was killed; `planning/test_techniques_study.py` has those of others."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from command_line import TIMEOUT_SECONDS, start

from search.read_study import read_study
from search.run_directory import trial_folder
from trials.records.events import START_MARK
from trials.records.trial_record import Outcome


def process_of(log: Path) -> int:
    """The process that writes a log, as soon as it says that it trains."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if log.exists() and "training begins" in (text := log.read_text()):
            return int(text.rpartition(f"{START_MARK}process ")[2].partition(",")[0])
        time.sleep(0.01)
    raise AssertionError(f"{log} did not get that far")


def test_a_killed_rank_is_told_with_the_log_of_its_attempt(
    click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "study"
    folder = trial_folder(out, 0)
    long = ("training.epochs=9", "training.patience=9", "ranks=1x2", "-vv")
    driver = start(click_log, out, environment, "trials=1", *long)
    os.kill(process_of(folder / "attempt0.rank1.log"), signal.SIGKILL)
    _, shown = driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 0, shown
    killed, again = read_study(out).trials[0].attempts
    assert killed.outcome is Outcome.INTERRUPTED
    assert again.outcome is Outcome.COMPLETED
    named = re.search(r"rank 1 was killed by signal 9 .*(attempt0\.rank1\.log)", killed.error or "")
    assert named, killed.error
    assert (folder / named[1]).exists()
    for name in ("attempt0.rank0.log", "attempt0.rank1.log", "attempt1.rank0.log", "attempt1.rank1.log"):
        assert "DEBUG rank " in (folder / name).read_text()  # as -vv asks for
    assert "training ended" in (folder / "attempt1.rank1.log").read_text()
    assert f"trial 0: {Outcome.INTERRUPTED} ({killed.error}), and is tried again" in shown
