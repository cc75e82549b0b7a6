"""Of several ranks that ended, the one that is to blame."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.records.events import START_MARK, FailureEvent, LastWords, Progress, RankLogs, last_words
from trials.runtime.rank_process import DATE_FORMAT, FORMAT, SERVER_GONE, RankExit, endings_of, verdict

KILLED_BY_US = RankExit(0, -9, "waiting", None)
SIGNAL, ABORT = RankExit(1, -11, None, None), RankExit(2, -6, None, None)


def words(rank: int, when: float, error: str = "lost a peer") -> RankExit:
    return RankExit(rank, 1, None, LastWords(failed=FailureEvent(error=error), unix_seconds=when))


@given(order=st.permutations([KILLED_BY_US, ABORT, words(3, 2.0), words(4, 1.0), SIGNAL]))
def test_the_order_of_ranks_does_not_matter(order: list[RankExit]) -> None:
    def cause(among: list[RankExit]) -> str:
        return verdict(among, None, RankLogs(Path("nowhere"), "attempt0"), None).error

    assert cause(order).startswith("rank 1 was killed by signal 11")
    order.remove(SIGNAL)
    assert cause(order).startswith("rank 4 failed at the start: lost a peer")
    assert "rank 0 was waiting and had to be killed" in cause(order)
    assert cause([KILLED_BY_US, ABORT]).startswith("rank 2 was killed by signal 6 (SIGABRT)")


def test_what_a_rank_knew_is_kept(tmp_path: Path) -> None:
    said = FailureEvent(error="too much", out_of_memory=True, needed_bytes=5, limit_bytes=3)
    (tmp_path / last_words(1)).write_text(LastWords(failed=said, unix_seconds=1.0).model_dump_json())
    (tmp_path / last_words(0)).write_text("half a")  # killed while it wrote
    found = endings_of({0: -signal.SIGKILL, 1: 1}, {0: "running"}, tmp_path)
    progress = Progress(examples=1000, total_examples=2000, seconds=1.0)
    failed = verdict(found, progress, RankLogs(tmp_path, "attempt0"), None)
    assert failed.error.startswith("rank 1 failed after 1,000 of 2,000 examples: too much")
    assert failed.replace(error=said.error) == said


def test_logs_of_earlier_runs_are_not_quoted(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, "attempt1")
    logs.path(0).write_text(f"{START_MARK}once\nold words\n{START_MARK}again\nnew words\n")
    failed = verdict([RankExit(0, 3, None, None)], None, logs, None)
    assert failed.error == (
        "the training process ended without a result (exit code 3) at the start; "
        "attempt1.rank0.log ends: new words"
    )


def test_lines_that_tell_how_well_all_goes_are_no_reason(tmp_path: Path) -> None:
    """What is logged at INFO and below, in the format that ranks log in."""

    def line(level: int, said: str) -> str:
        record = logging.LogRecord("trials.training.loop", level, "loop.py", 1, said, (), None)
        return logging.Formatter(FORMAT, DATE_FORMAT).format(record) + "\n"

    logs = RankLogs(tmp_path, "attempt0")
    end = verdict([RankExit(0, -11, None, None)], None, logs, None).error
    assert end.endswith("at the start")  # it did not get as far as a log
    well = line(logging.INFO, "training begins") + line(logging.DEBUG, "a detail")
    logs.path(0).write_text(f"{START_MARK}once\n{well}")
    end = verdict([RankExit(0, -11, None, None)], None, logs, None).error
    assert end.endswith("(SIGSEGV) at the start; its log is attempt0.rank0.log")
    bad = line(logging.WARNING, "it is hot") + "Segmentation fault\n"
    logs.path(0).write_text(f"{START_MARK}once\n{well}{bad}{well}")
    end = verdict([RankExit(0, -11, None, None)], None, logs, None).error
    assert "training begins" not in end
    assert "a detail" not in end
    assert end.endswith("it is hot | Segmentation fault")


@pytest.mark.parametrize("short", [False, True], ids=["memory to spare", "memory was short"])
def test_who_killed_it(tmp_path: Path, short: bool) -> None:
    """The driver; the kernel, where it says so; or someone else."""

    def why(ending: RankExit) -> tuple[bool, bool]:
        found = verdict([ending], None, RankLogs(tmp_path, "attempt0"), None, memory_was_short=short)
        return found.out_of_memory, found.killed

    assert why(KILLED_BY_US) == why(SIGNAL) == why(ABORT) == (False, False)
    assert why(RankExit(0, -signal.SIGKILL, None, None)) == (short, not short)
    assert why(RankExit(0, -signal.SIGTERM, None, None)) == (False, True)
    assert why(RankExit(0, SERVER_GONE, None, None)) == (False, True)
