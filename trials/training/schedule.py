"""What a rank does, one after another: steps, and evaluations after some of them.

Ranks that train together take all batches in order, each its part of them. Ranks that train on their own
(`training.tables.synchrony=async`) are handed whole batches, as they come to ask for them, by the first
server; the first rank evaluates when all batches up to an evaluation are done
(`trials.training.servers.server`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.loader import LabelledBatch, NumberedBatches, train_batches
from trials.data.prepared_log import IdCounts, PreparedLog
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Strategy
from trials.store.weights import Weights
from trials.training.checkpointer import TrainingState
from trials.training.distributed_step import fresh_step
from trials.training.servers.client import Servers
from trials.training.servers.server import BatchAnswer, Losses
from trials.training.step import ONE_RANK, DivergenceError

# Learning rates from step to step: a schedule over all passes, a warm-up of the dense part's, and plateaus.


def rate_factors(
    config: TrainingConfig, examples: int, plateaus: float, total_examples: int
) -> tuple[float, float]:
    """Returns what the learning rates of the dense part and of the tables are multiplied by at the next step.

    Args:
        config: resolved.
        examples: training examples so far.
        plateaus: the factor that evaluations without a better NE have left.
        total_examples: those of all passes.
    """
    share_done = examples / total_examples
    scheduled = {
        "constant": 1.0,
        "linear": 1.0 - share_done,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * share_done),
    }
    factor = scheduled[config.schedule] * plateaus
    # the warm-up's factor is a share that rises to 1 with the examples, this step's included
    assert config.batch_size is not None
    over = config.warmup_examples or config.warmup_share * total_examples
    warmup = min(1.0, (examples + config.batch_size) / over) if over else 1.0
    return factor * warmup, factor


LOG = logging.getLogger(__name__)


class Turn(NamedTuple):
    """A step, an evaluation, or both."""

    batch: LabelledBatch | None
    """The batch to train on, on this process's device; None if others have trained on what is evaluated."""
    following: LabelledBatch | None
    """The batch of the next turn, if it is known."""
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
        rows = config.rows_used(log.manifest.rows["train"])
        self.per_pass = max(1, rows // config.batch_size)
        """Number of batches of a pass."""
        self.steps = config.epochs * self.per_pass
        """Number of batches of all passes."""
        decays = config.frequency_decay and features.tables
        self._settings: dict[str, Any] = {
            "batch_size": config.batch_size,
            "seed": job.seed,
            "last_rows": rows,
            "shuffle": config.order == "shuffled",
            "counts": IdCounts(self._split, rows, features.growing_columns) if decays else None,
            "timed": features.timed,
        }
        """What `train_batches` and `NumberedBatches` take alike."""

    def from_step(self, step: int, rank: int, ranks: int) -> Iterator[LabelledBatch]:
        """Yields a rank's part of all batches from the one of a step on."""
        passed, batches = divmod(step, self.per_pass)
        for epoch in range(passed, self.steps // self.per_pass):
            start = batches if epoch == passed else 0
            yield from train_batches(
                self._split, epoch=epoch, start_batch=start, rank=rank, ranks=ranks, **self._settings
            )

    def by_number(self) -> NumberedBatches:
        """Returns the same batches, whole, to be asked for by their number, higher and higher ones."""
        return NumberedBatches(self._split, **self._settings)


def in_order(batches: Iterator[LabelledBatch], batch_size: int, state: TrainingState) -> Iterator[Turn]:
    """Yields a turn for each batch; it evaluates if so many examples are done then, or it is the last."""
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
        DivergenceError: if the loss of a rank is not finite.
    """
    assert config.batch_size is not None
    numbered, of_last, evaluated = batches.by_number(), Losses(0.0, 0, 0), state.steps
    while True:
        # a batch may be larger than what is between evaluations, and without a step there is nothing to evaluate
        due = max(math.ceil(state.next_evaluation / config.batch_size), evaluated + 1)
        until = min(due, batches.steps)
        told = servers.next(until, state.rate_factor, of_last)
        if told.answer is BatchAnswer.TRAIN:
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
    while (told := servers.next(0, 0.0, done)).answer is BatchAnswer.TRAIN:
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
