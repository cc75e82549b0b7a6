"""Progressive validation: a split is gone through in the order of time, and each period is scored before it is
trained on.

A model that goes on learning in production is judged so (Blum, Kalai, Langford, COLT 1999; for click logs McMahan
et al., KDD 2013, section 5.1): each score is of a row that the model has not seen, and it has seen all rows before
the row's period. Training goes on from given weights, with their optimizer state if it is
beside them, as `dhen-search online` does.

Shapes: N rows of a split.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dhen.model import build_model
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.loader import even_batches, on_device
from trials.data.periods import AFTER_TRAINING, Periods
from trials.data.prepared_log import PreparedLog, Split
from trials.records.events import Event, Progress
from trials.records.job import LOCAL_TABLES, Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy
from trials.records.trial_record import Metrics
from trials.store.weights import OPTIMIZER, Weights
from trials.training.checkpointer import put_back
from trials.training.distributed_step import fresh_step
from trials.training.evaluation import Keep, metrics_over_ranks
from trials.training.memory_limit import on_host
from trials.training.process_group import all_agree
from trials.training.step import DivergenceError, Step

FIXED = {
    "epochs": 1,
    "schedule": "constant",
    "order": "log",
    "weight_average": 0,
    "warmup_examples": 0,
    "warmup_share": 0.0,
    "train_fraction": 1.0,
    "delayed_update": False,
    "frequency_decay": 0.0,
    "optimizer": "adamw",
    "tables": LOCAL_TABLES,
}
"""Settings that follow from the order of time: every row is trained on once, at a constant rate."""


def in_order_of_time(training: TrainingConfig) -> TrainingConfig:
    """Returns the settings of a training whose rows come once, in the order of time."""
    return training.replace(**FIXED)


class Pulse:
    """Emits progress now and then: periods have no evaluations, and their ranks shall not be taken for hanging."""

    def __init__(self, emit: Callable[[Event], None], every_seconds: float, *, examples: int) -> None:
        """Emits that so many examples were trained on, every so many seconds at most."""
        self._emit, self._every, self._examples = emit, every_seconds, examples
        self._began = self._last = time.perf_counter()

    def __call__(self) -> None:
        """Says that the process is at work."""
        now = time.perf_counter()
        if now - self._last > self._every:
            self._last = now
            total = self._examples
            self._emit(Progress(examples=total, total_examples=total, seconds=now - self._began))


def train_once(
    step: Step, rows: Split, job: Job, ranks: Ranks, goes_on: Callable[[], None] = lambda: None
) -> int:
    """Trains on rows in their order, once, in steps of equal sizes up to one row; returns the number of steps.
    `goes_on` is called after each.

    Raises:
        DivergenceError: if a loss or a weight is not finite.
    """
    assert job.training.batch_size is not None
    data = ranks.data_part(step.strategy.pipeline)
    batches = even_batches(
        rows, most=job.training.batch_size, rank=data.rank, ranks=data.ranks, timed=job.features.timed
    )
    steps, loss, finite = 0, torch.zeros(()), torch.tensor(True, device=device())
    for batch, following in itertools.pairwise(itertools.chain(on_device(batches, device()), (None,))):
        assert batch is not None
        if following is not None:
            step.ahead(following)
        loss, steps = step(batch), steps + 1
        finite = finite.logical_and(loss.isfinite())
        goes_on()
    step.settle()
    # both are asked on every rank: in a pipeline the last stage alone has losses
    all_finite = all_agree(ranks, bool(finite)), step.is_finite()
    if not all(all_finite):
        raise DivergenceError(steps, float(loss))
    return steps


def score_ahead(
    job: Job,
    weights: Weights,
    log: PreparedLog,
    split_name: str,
    *,
    ranks: Ranks,
    strategy: Strategy,
    cluster: Cluster | None,
    evaluation_rows: int | None = None,
    keep: Keep | None = None,
    goes_on: Callable[[], None] = lambda: None,
) -> Metrics:
    """Returns metrics of a split, each of whose periods is scored before it is trained on; equal on all ranks, a
    collective.

    Before the rows of test those of validation are gone through in the same way.

    Args:
        job: the job, resolved; its `period` is the length of a period.
        weights: the weights to begin with, and their optimizer state, on the first rank.
        log: the job's log.
        split_name: `validation` or `test`.
        ranks: the ranks that train together.
        strategy: how the model is held.
        cluster: the cluster for which tables are placed.
        evaluation_rows: rows of a rank that are scored at once, by the plan.
        keep: is given the logits of all rows, on the first rank.
        goes_on: is called after each step.

    Raises:
        DivergenceError: if a loss or a weight is not finite.
        UserError: for weights of another model, or a log that cannot be cut so.
    """
    assert job.period is not None
    names = AFTER_TRAINING[: AFTER_TRAINING.index(split_name) + 1]
    periods = Periods.of(log, job.period, names, unstamped=True)
    total = job.training.examples(log.manifest.rows["train"])
    job = job.replace(training=in_order_of_time(job.training))
    learnt = {name: tensor for name, tensor in weights.items() if name.startswith(OPTIMIZER)}
    plain = {name: tensor for name, tensor in weights.items() if name not in learnt}
    start_from = _on_all_ranks(job, plain, ranks)
    step = fresh_step(
        job, start_from, ranks, strategy, cluster, evaluation_rows=evaluation_rows, total_examples=total
    )
    put_back(step, learnt, ranks)
    logit_N = torch.empty(len(periods.rows))
    for number in range(len(periods)):
        period = periods[number]
        logits = step.logits(period.rows)
        if logits is not None:
            span = slice(periods.starts[number], periods.starts[number + 1])
            logit_N[torch.from_numpy(periods.rows[span])] = logits
        if number < len(periods) - 1:
            train_once(step, period.rows, job, ranks, goes_on)
    split = log.split(split_name)
    return metrics_over_ranks(logit_N[-split.rows :] if ranks.first else None, split, log, ranks, keep)


def _on_all_ranks(job: Job, weights: Weights, ranks: Ranks) -> Weights:
    """Returns the first rank's weights, on all ranks; a collective."""
    if ranks.world == 1:
        return weights
    with on_host():
        model = build_model(job.model, job.features)
        if ranks.first:
            model.load_state_dict(weights)
        shared: Weights = model.state_dict()
        for tensor in shared.values():
            dist.broadcast(tensor, 0)
    return shared
