"""What is killed from outside is tried again, once as it was; then as if memory had been short."""

from __future__ import annotations

from random import Random

import records

from search.execution.reduce_events import AttemptContext, reduce_event, with_attempt
from trials.records.events import Failed
from trials.records.strategy import Strategy
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

KILLED = Failed(error="rank 1 was killed by signal 9 (SIGKILL)", killed=True)


def after(record: TrialRecord, event: Failed) -> TrialRecord:
    return with_attempt(
        reduce_event(record, event), event, 1.0, AttemptContext(Strategy(), counted=False, planned_here=True)
    )


def test_the_second_time_memory_is_blamed() -> None:
    record = records.trial(3, Random(0), kind=TrialKind.CANDIDATE).with_result(
        outcome=Outcome.RUNNING, technique="dp"
    )
    once = after(record, KILLED)
    assert (once.result.outcome, once.result.error) == (Outcome.INTERRUPTED, KILLED.error)
    twice = after(once, KILLED)
    assert [attempt.outcome for attempt in twice.attempts] == [Outcome.INTERRUPTED, Outcome.OUT_OF_MEMORY]
    left = KILLED.replace(host_left=True)
    many = record
    for _ in range(10):
        many = after(many, left)
        assert many.result.outcome is Outcome.INTERRUPTED
    assert after(many, left).result.outcome is Outcome.OUT_OF_MEMORY
    stopped = Failed(error="rank 1 stopped", stopped=True)
    assert after(record, stopped).result.outcome is Outcome.INTERRUPTED
    assert after(after(record, stopped), stopped).result.outcome is Outcome.FAILED
    assert after(record, Failed(error="full", out_of_memory=True)).result.outcome is Outcome.OUT_OF_MEMORY
    assert after(record, Failed(error="wrong")).result.outcome is Outcome.FAILED
