"""Who is handed which batch, and when an evaluation is due."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from command_line import write_log

from dhen.model import parse_model
from search.execution.trainer import job_on
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.training.checkpointer import TrainingState
from trials.training.schedule import PassBatches, handed_out
from trials.training.servers.client import Servers
from trials.training.servers.server import BatchAnswer, BatchGrant, Dispenser, Losses

NOTHING = Losses(0.0, 0, 0)


class Workers:
    """Some workers, each of which may wait."""

    def __init__(self, count: int) -> None:
        self.lock = threading.Condition()
        self.dispenser = Dispenser(self.lock)
        self._pools = [ThreadPoolExecutor(1) for _ in range(count)]

    def ask(self, worker: int, until: int | None = None, done: Losses = NOTHING) -> Future[BatchGrant]:
        def call() -> BatchGrant:
            with self.lock:
                return self.dispenser.next(worker, until, 0.5 if worker == 0 else 0.0, done)

        return self._pools[worker].submit(call)

    def told(self, worker: int, until: int | None = None, done: Losses = NOTHING) -> BatchGrant:
        return self.ask(worker, until, done).result(timeout=60)


def test_batches_are_handed_out_in_order_up_to_an_evaluation() -> None:
    workers = Workers(2)
    assert workers.told(0, until=3)[:2] == (BatchAnswer.TRAIN, 0)
    told = workers.told(1)
    assert told[:3] == (BatchAnswer.TRAIN, 1, 0.5)  # with the first worker's factor of learning rates
    assert workers.told(1, done=Losses(2.0, 1, 0))[:2] == (BatchAnswer.TRAIN, 2)
    waits, evaluates = workers.ask(1, done=Losses(3.0, 1, 1)), workers.ask(0, until=3, done=Losses(1.0, 1, 0))
    told = evaluates.result(timeout=60)
    assert told[:2] == (BatchAnswer.EVALUATE, 3)
    assert told.losses == Losses(6.0, 3, 1)
    assert told.behind == {0: 2, 2: 1}  # while the first had its batch, two others were handed out
    assert not waits.done()
    assert workers.told(0, until=5)[:2] == (BatchAnswer.TRAIN, 3)
    assert waits.result(timeout=60)[:2] == (BatchAnswer.TRAIN, 4)


def test_an_evaluation_waits_for_all_batches_before_it() -> None:
    workers = Workers(2)
    workers.told(0, until=2)
    workers.told(1)
    evaluates = workers.ask(0, until=2)
    with pytest.raises(TimeoutError):
        evaluates.result(timeout=0.2)
    waits = workers.ask(1)
    assert evaluates.result(timeout=60).answer is BatchAnswer.EVALUATE
    with workers.lock:
        workers.dispenser.end()
    assert waits.result(timeout=60).answer is BatchAnswer.END


def test_a_worker_that_is_gone_takes_its_batch_along() -> None:
    workers = Workers(2)
    workers.told(0, until=2)
    workers.told(1)
    evaluates = workers.ask(0, until=2)
    with workers.lock:
        workers.dispenser.gone(1)
    assert evaluates.result(timeout=60)[:2] == (BatchAnswer.EVALUATE, 2)
    assert workers.dispenser.lost == 1


class Alone:
    """The servers of a training that one rank does."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._dispenser = Dispenser(self._lock)

    def next(self, until: int, rate_factor: float, done: Losses) -> BatchGrant:
        with self._lock:
            return self._dispenser.next(0, until, rate_factor, done)


@pytest.mark.parametrize(
    ("batch_size", "every", "evaluated"),
    [
        (400, 100, [1, 2, 3, 4, 5, 6]),
        (400, 300, [1, 2, 3, 4, 5, 6]),
        (400, 900, [3, 5, 6]),
        (100, 600, [6, 12, 18, 24]),
    ],
)
def test_each_evaluation_follows_a_step(
    tmp_path: Path, batch_size: int, every: int, evaluated: list[int]
) -> None:
    """Also where a batch has more examples than there are between two evaluations."""
    prepare([write_log(tmp_path / "log.csv", 1000)], out=tmp_path / "log")
    log = PreparedLog.open(tmp_path / "log")
    config = TrainingConfig(epochs=3, batch_size=batch_size, evaluate_every=every)
    model = parse_model({"embedding_dim": 4, "layers": [{"modules": ["mlp"]}]}, "test")
    job = job_on(log, model, config, 0, "fp32")
    state, found = TrainingState(next_evaluation=every), []
    turns = handed_out(
        PassBatches(job, log), cast("Servers", Alone()), state, job.training, lambda: Losses(1.0, 1, 0)
    )
    for turn in turns:
        if turn.evaluates:
            found.append(turn.steps)
            assert state.loss_steps > 0
            state.next_evaluation += every
    assert found == evaluated
