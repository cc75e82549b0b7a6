"""What a rank does, one after another: steps, and evaluations after some of them.

Ranks that train together take all batches in order, each its part of them. Ranks that train on their own
(`training.tables.synchrony=async`) are handed whole batches, as they come to ask for them, by the first server;
the first rank evaluates when all batches up to an evaluation are done (`trials.servers.dispenser`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from trials.checkpoint.training_state import TrainingState
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.cache import PreparedLog
from trials.data.id_counts import IdCounts
from trials.data.loader import Batch, NumberedBatches, train_batches
from trials.job import Job, TrainingConfig
from trials.servers.client import Servers
from trials.servers.dispenser import Answer, Losses
from trials.storage.weights_file import Weights
from trials.strategy import Strategy
from trials.training.learning_rates import rate_factors
from trials.training.step import ONE_RANK, DivergenceError, fresh_step

LOG = logging.getLogger(__name__)


class Turn(NamedTuple):
    """A step, an evaluation, or both."""

    batch: Batch | None
    """The batch to train on, on this process's device; None where others have trained on what is evaluated."""
    following: Batch | None
    """The batch of the next turn, where it is known."""
    steps: int
    """Number of steps of the training when the turn is over."""
    evaluates: bool
    last: bool
    """Whether all passes are over with it."""


class PassBatches:
    """The batches of all passes of a training."""

    def __init__(self, job: Job, log: PreparedLog) -> None:
        config, self._split, features = job.training, log.split("train"), job.features
        assert config.batch_size is not None
        assert config.epochs != "auto"
        self._rows = config.rows_used(log.manifest.rows["train"])
        self._seed, self._batch_size = job.seed, config.batch_size
        self.per_pass = max(1, self._rows // config.batch_size)
        """Number of batches of a pass."""
        self.steps = config.epochs * self.per_pass
        """Number of batches of all passes."""
        self._shuffle, self._timed = config.order == "shuffled", features.timed
        decays = config.frequency_decay and features.tables
        self._counts = IdCounts(self._split, self._rows, features.growing_columns) if decays else None

    def from_step(self, step: int, rank: int, ranks: int) -> Iterator[Batch]:
        """Yields a rank's part of all batches from the one of a step on."""
        passed, batches = divmod(step, self.per_pass)
        for epoch in range(passed, self.steps // self.per_pass):
            yield from train_batches(
                self._split,
                batch_size=self._batch_size,
                seed=self._seed,
                epoch=epoch,
                last_rows=self._rows,
                shuffle=self._shuffle,
                start_batch=batches if epoch == passed else 0,
                rank=rank,
                ranks=ranks,
                counts=self._counts,
                timed=self._timed,
            )

    def by_number(self) -> NumberedBatches:
        """Returns the same batches, whole, to be asked for by their number, higher and higher ones."""
        return NumberedBatches(
            self._split,
            batch_size=self._batch_size,
            seed=self._seed,
            last_rows=self._rows,
            shuffle=self._shuffle,
            counts=self._counts,
            timed=self._timed,
        )


def in_order(batches: Iterator[Batch], batch_size: int, state: TrainingState) -> Iterator[Turn]:
    """Yields a turn for each batch; it evaluates where so many examples are done then, or it is the last."""
    ahead, steps = itertools.chain(batches, (None,)), state.steps
    current = next(ahead)
    for following in ahead:
        assert current is not None
        steps, last = steps + 1, following is None
        due = steps * batch_size >= state.next_evaluation
        yield Turn(current, following, steps, last or due, last)
        current = following


def handed_out(
    batches: PassBatches,
    servers: Servers,
    state: TrainingState,
    config: TrainingConfig,
    done: Callable[[], Losses],
) -> Iterator[Turn]:
    """Yields the turns of the first of the ranks that train on their own.

    Args:
        batches: the training's.
        servers: the servers.
        state: where the training stands; the losses of all ranks are put there before an evaluation.
        config: resolved.
        done: tells what the last batch came to.

    Raises:
        DivergenceError: where the loss of a rank is not finite.
    """
    assert config.batch_size is not None
    numbered, of_last, evaluated = batches.by_number(), Losses(0.0, 0, 0), state.steps
    while True:
        # a batch may be larger than what is between evaluations, and without a step there is nothing to evaluate
        due = max(math.ceil(state.next_evaluation / config.batch_size), evaluated + 1)
        until = min(due, batches.steps)
        told = servers.next(until, state.rate_factor, of_last)
        if told.answer is Answer.TRAIN:
            yield Turn(
                numbered.batch(told.number).to(device()), None, told.number + 1, evaluates=False, last=False
            )
            of_last = done()
            continue
        of_last, evaluated = Losses(0.0, 0, 0), told.number
        state.loss_sum, state.loss_steps, state.clipped_steps = told.losses
        if not math.isfinite(state.loss_sum):
            raise DivergenceError(told.number, state.loss_sum)
        yield Turn(None, None, told.number, evaluates=True, last=told.number >= batches.steps)
        if told.number >= batches.steps:
            return


def assist(
    job: Job,
    log: PreparedLog,
    servers: Servers,
    start_from: Weights | None,
    strategy: Strategy,
    cluster: Cluster | None,
) -> None:
    """Trains on its own on the batches that it is handed, until the first rank ends the training.

    Args:
        job: the job, resolved.
        log: the job's log.
        servers: the servers.
        start_from: other weights to begin with in place of fresh ones.
        strategy: how the model is held.
        cluster: the cluster for which the job was planned.
    """
    config = job.training
    step = fresh_step(job, start_from, ONE_RANK, strategy, cluster, servers)
    torch.manual_seed(hash((job.seed, servers.worker)))  # dropout of its own
    batches, done = PassBatches(job, log), Losses(0.0, 0, 0)
    numbered, total = batches.by_number(), config.examples(log.manifest.rows["train"])
    assert config.batch_size is not None
    joined = 0
    while (told := servers.next(0, 0.0, done)).answer is Answer.TRAIN:
        if not joined:
            step.restored({}, told.number)  # others may have trained before
        step.scale_learning_rates(
            *rate_factors(config, told.number * config.batch_size, told.rate_factor, total)
        )
        if told.number % batches.per_pass == 0:
            step.begin_pass()
        loss = step(numbered.batch(told.number).to(device()))
        done, joined = Losses(float(loss), 1, step.clipped_steps()), joined + 1
    LOG.info("trained on %d batches", joined)
