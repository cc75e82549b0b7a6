"""What a rank does, one after another: steps, and evaluations after some of them.

Ranks that train together take all batches in order, each its part of them. Ranks that train on their own
(`training.tables.synchrony=async`) are handed whole batches, as they come to ask for them, by the first
server; the first rank evaluates when all batches up to an evaluation are done
(`trials.training.servers.server`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.loader import Batch, NumberedBatches, train_batches
from trials.data.prepared_log import IdCounts, PreparedLog
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Strategy
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.checkpointer import Resumable, TrainingState
from trials.training.embeddings.growing import KEYS, TABLE_WEIGHTS
from trials.training.memory_limit import on_host
from trials.training.servers.client import Servers
from trials.training.servers.server import Answer, Losses
from trials.training.step import ONE_RANK, DivergenceError, fresh_step

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
    return factor * _warmup(config, examples, total_examples), factor


def _warmup(config: TrainingConfig, examples: int, total_examples: int) -> float:
    """Returns the warm-up's factor of the dense learning rate: a share that rises to 1 with the examples."""
    assert config.batch_size is not None
    examples_seen = examples + config.batch_size  # with this step's
    over = config.warmup_examples or config.warmup_share * total_examples
    return min(1.0, examples_seen / over) if over else 1.0


LOG = logging.getLogger(__name__)


class Turn(NamedTuple):
    """A step, an evaluation, or both."""

    batch: Batch | None
    """The batch to train on, on this process's device; None if others have trained on what is evaluated."""
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
        DivergenceError: if the loss of a rank is not finite.
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


# The mean of a training's weights at its last K evaluations, tried at each beside the weights themselves.
#
# Latest weight averaging (arXiv 2209.14981): as in SWA (arXiv 1803.05407) points along one training are
# averaged, but the newest K, so that nothing has to be known of when the training will end. The training itself
# goes on from its own weights. Dense part and tables are averaged: the dense part alone, with tables that it was
# not trained with, gained less (docs/log.md). No batch statistics have to be made anew: networks here have none.
#
# A row of a growing table that has gone to another key meanwhile has the mean since then.
#
# Each rank averages what it holds, whatever the strategy, in host memory: K copies of its weights as they are
# stored, none on the device.

WEIGHT = "weight"
"""Name of weights in a step's dense state, and before the dot in its table state."""


class WeightAverage:
    """The average of one step's weights; every rank makes the same calls in the same order."""

    def __init__(self, step: Resumable, evaluations: int) -> None:
        """`evaluations` is K, how many evaluations' weights there are at most in the mean."""
        self._step = step
        self._noted: deque[dict[str, Tensor]] = deque(maxlen=evaluations)

    @property
    def is_mean(self) -> bool:
        """Whether there are two weights at least to be averaged."""
        return len(self._noted) > 1

    def note(self) -> None:
        """Takes the weights as they are into the mean; the step must be settled."""
        with on_host():
            self._noted.append(
                {name: tensor.to("cpu", copy=True) for name, tensor in _held(self._step).items()}
            )

    @contextlib.contextmanager
    def in_place(self, steps: int) -> Iterator[None]:
        """Gives the step, which has made so many updates, the mean inside; afterwards what was noted last."""
        self._write([*self._noted], steps)
        try:
            yield
        finally:
            self._write([self._noted[-1]], steps)

    def state(self) -> Iterator[tuple[FlatPieces, dict[str, Tensor]]]:
        """Yields for a checkpoint the dense weights and the table parts of each set in the mean, oldest first."""
        dense = self._step.dense_state()[WEIGHT]
        for noted in self._noted:
            pieces = (Piece(start, noted[f"{WEIGHT}{start}"]) for start, _ in dense.pieces)
            table_parts = {name: tensor for name, tensor in noted.items() if name.startswith(TABLE_WEIGHTS)}
            yield FlatPieces(dense.length, tuple(pieces)), table_parts

    @torch.no_grad()
    def _write(self, noted: list[dict[str, Tensor]], steps: int) -> None:
        """Writes the mean of some sets, one tensor after another, rounded on the host to what the step stores."""
        for name, tensor in _held(self._step).items():
            if name.startswith(f"{KEYS}."):
                continue  # they go with the training, and are those that were noted last
            with on_host():
                mean = noted[0][name].float()
                for weights in noted[1:]:
                    mean = mean + weights[name]
                mean = (mean / len(noted)).to(tensor.dtype)
                if name.startswith(f"{WEIGHT}."):
                    _mean_of_keys(mean, name, noted)
            tensor.copy_(mean)
        self._step.restored(self._step.table_state(), steps)


def _mean_of_keys(mean_RC: Tensor, name: str, noted: list[dict[str, Tensor]]) -> None:
    """Puts into the mean of a part of a growing table, for each row, that of the sets since it has its key.

    Shapes: K sets, R rows of the table but the default row, C columns of the part.
    """
    keys = f"{KEYS}.{name.removeprefix(f'{WEIGHT}.').rpartition('.')[0]}"
    if keys not in noted[-1]:
        return
    same_KR = torch.stack([weights[keys] == noted[-1][keys] for weights in noted])
    since_KR = same_KR.flip(0).cumprod(0).flip(0)
    rows = (since_KR.sum(dim=0) < len(noted)).nonzero().squeeze(1)
    sets_KR1 = since_KR[:, rows].unsqueeze(2)
    of_rows = torch.stack([weights[name][1 + rows].float() for weights in noted])
    mean_RC[1 + rows] = ((of_rows * sets_KR1).sum(dim=0) / sets_KR1.sum(dim=0)).to(mean_RC.dtype)


def _held(step: Resumable) -> dict[str, Tensor]:
    """Returns all weights of this rank, as views of what trains: the dense part's by where they begin, and the
    tables' parts."""
    dense = {f"{WEIGHT}{start}": values for start, values in step.dense_state()[WEIGHT].pieces}
    return dense | {name: t for name, t in step.table_state().items() if name.startswith(TABLE_WEIGHTS)}
