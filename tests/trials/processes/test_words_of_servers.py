"""What is said of servers of tables that ended: they are no ranks, and their memory is not the ranks'."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from search.execution.reduce_events import reduce_event
from trials.records.events import FailureEvent, LastWords, Progress, RankLogs
from trials.records.trial_record import Attempt, Outcome, TrialKind, TrialRecord
from trials.runtime.rank_process import SERVER_MEMORY, RankExit, verdict

PROGRESS = Progress(examples=900, total_examples=2000, seconds=1.0, unsaved_steps=12)
LOST_A_PEER = RankExit(
    0, 1, None, LastWords(failed=FailureEvent(error="LinkBrokenError: gone"), unix_seconds=5.0)
)


@pytest.fixture
def logs(tmp_path: Path) -> RankLogs:
    return RankLogs(tmp_path, "attempt0", ranks=2)


def test_processes_behind_the_ranks_are_servers(logs: RankLogs) -> None:
    assert [logs.words(process) for process in range(4)] == ["rank 0", "rank 1", "server 0", "server 1"]
    assert [logs.path(process).name for process in (1, 2)] == ["attempt0.rank1.log", "attempt0.server0.log"]
    assert RankLogs(logs.folder, "attempt0").words(3) == "rank 3"


def test_a_server_that_is_killed_is_the_cause_and_says_what_went_with_it(logs: RankLogs) -> None:
    failed = verdict([LOST_A_PEER, RankExit(3, -signal.SIGKILL, None, None)], PROGRESS, logs, None)
    assert failed.error == (
        "server 1 was killed by signal 9 (SIGKILL) after 900 of 2,000 examples; the updates of 12 step(s) since "
        "its newest checkpoint are lost with it, and made again"
    )
    assert failed.killed
    assert failed.of_server
    assert not failed.out_of_memory


def test_a_server_without_memory_is_no_rank_without_memory(logs: RankLogs) -> None:
    words = LastWords(
        failed=FailureEvent(
            error="RuntimeError: DefaultCPUAllocator: can't", out_of_memory=True, needed_bytes=7
        ),
        unix_seconds=1.0,
    )
    said = RankExit(2, 1, None, words)
    by_kernel = RankExit(2, -signal.SIGKILL, None, None)
    for ending, how in ((said, "failed after"), (by_kernel, "was killed by signal 9")):
        failed = verdict([LOST_A_PEER, ending], PROGRESS, logs, None, memory_was_short=True)
        assert failed.error.startswith(f"server 0 {how}")
        assert SERVER_MEMORY in failed.error
        assert failed.of_server
        assert not failed.out_of_memory
        assert not failed.killed
        assert failed.needed_bytes is None
        record = TrialRecord(number=1, kind=TrialKind.CANDIDATE)
        assert reduce_event(record, failed).result.outcome is Outcome.FAILED


def test_a_server_killed_again_and_again_ends_its_candidate_and_no_rank_is_to_blame() -> None:
    record = TrialRecord(number=1, kind=TrialKind.CANDIDATE)
    cut_short = Attempt(strategy="dp", outcome=Outcome.INTERRUPTED, predicted_bytes=None)
    failed = FailureEvent(error="server 0 was killed", killed=True, of_server=True)
    for attempts, outcome in ((9, Outcome.INTERRUPTED), (10, Outcome.FAILED)):
        again = record.replace(attempts=(cut_short,) * attempts)
        assert reduce_event(again, failed).result.outcome is outcome
        of_rank = reduce_event(again, failed.replace(of_server=False))
        assert of_rank.result.outcome is Outcome.OUT_OF_MEMORY


def test_who_is_waited_for_is_named(logs: RankLogs) -> None:
    endings = [
        RankExit(0, -9, "waiting", None),
        RankExit(1, -9, "stopped", None),
        RankExit(2, -9, "waiting", None),
    ]
    failed = verdict(endings, PROGRESS, logs, 30.0)
    assert failed.error.startswith(
        "no progress for 30.0 s, after 900 of 2,000 examples: rank 0 waiting, rank 1 stopped, server 0 waiting; "
        "the others wait for rank 1, which is stopped"
    )
