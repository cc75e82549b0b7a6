"""One training step of a model, however it is held: what it can do, and how a fresh one is made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from dhen.inputs.fresh_rows import part_of_tables
from dhen.model import build_model
from trials.checkpoint.checkpointer import Resumable
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.cache import PreparedLog, Split
from trials.data.loader import Batch
from trials.distributed.table_split import TABLES
from trials.embeddings.fp16 import store_tables_in_half
from trials.embeddings.levels.row_cache import CacheUse
from trials.exclusions import check_together
from trials.job import Job
from trials.memory.limit import on_device_for_good, on_host
from trials.ranks import Ranks
from trials.record import Metrics
from trials.servers.client import Servers
from trials.storage.weights_file import Weights, with_own
from trials.strategy import Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.local_step import TrainStep

LOG = logging.getLogger(__name__)
ONE_RANK, PLAIN_DP = Ranks(), Strategy()


class DivergenceError(ArithmeticError):
    """The loss of a step was NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss {loss} at step {step}")
        self.step, self.loss = step, loss


class Step(Resumable, Protocol):
    """One training step of a model, however it is held."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that the model is held with, read from what wraps it."""

    def __call__(self, batch: Batch) -> Tensor:
        """Runs one update on this rank's slice; returns its loss, whose mean over ranks is the batch's."""

    @property
    def cache_use(self) -> CacheUse | None:
        """What the cache of tables that lie below the device has done so far; None where there is none."""

    def ahead(self, batch: Batch) -> None:
        """Is told, before a step, the batch that comes after its own, whose rows may be fetched meanwhile."""

    @property
    def staleness(self) -> dict[int, int] | None:
        """How often the rows of a batch lacked the updates of so many steps; None where no servers hold tables."""

    def begin_pass(self) -> None:
        """Is called before the first step of each pass."""

    def scale_learning_rates(self, dense: float, tables: float) -> float:
        """Sets learning rates to multiples of the configured ones; returns the dense part's, for the record."""

    def settle(self) -> None:
        """Brings all table rows up to date."""

    def clipped_steps(self) -> int:
        """Returns the number of steps since the last call whose gradients were clipped; the same on all ranks."""

    def is_finite(self) -> bool:
        """Tells whether no dense weight is NaN or infinite; the same on all ranks."""

    def evaluate(self, log: PreparedLog, split_name: str) -> Metrics:
        """Evaluates on a split of the log; the same on all ranks."""

    def logits(self, split: Split) -> Tensor | None:
        """Returns the logits (N) of a split's rows on the first rank, in the host's memory; None on others."""

    def weights(self) -> Weights:
        """Returns a copy of the model's weights on the CPU, in fp32; on rank 0, empty on others."""

    def nothing_changed(self) -> None:
        """Is told that the state which `changed` will be given next is the model's as it is now."""

    def changed(self, before: Mapping[str, Tensor]) -> Weights:
        """Returns what makes of an earlier state of the model what it is, as `trials.storage.weight_changes` has
        it; on rank 0. `before`, on the CPU in fp32, must have all changes that were returned earlier."""


def fresh_step(
    job: Job,
    start_from: Weights | None,
    ranks: Ranks,
    strategy: Strategy,
    cluster: Cluster | None,
    servers: Servers | None = None,
    evaluation_rows: int | None = None,
    total_examples: int = 0,
) -> Step:
    """Makes a step whose weights follow from the seed, alike on all ranks; what dropout draws differs from rank to
    rank. Of a rank `evaluation_rows` go forward at once in an evaluation, if a plan sets them. The
    `total_examples` of all passes decide when gradients begin to be compressed."""
    check_together(job.training, strategy)
    torch.manual_seed(job.seed)
    with on_host():
        with nullcontext() if servers is None else part_of_tables(None):
            model = build_model(job.model, job.features).train()
        if start_from is not None:
            model.load_state_dict(start_from if servers is None else with_own(model, start_from, TABLES))
        if job.training.table_precision == "fp16":
            store_tables_in_half(model)  # before a device would need room for them in fp32
    plain = not job.training.frequency_decay and job.training.optimizer == "adamw" and servers is None
    if ranks.world == 1 and strategy == PLAIN_DP and plain:
        LOG.info("model and tables on %s, in one process", device())
        model = on_device_for_good(model, device())
        return TrainStep(model, job.training, evaluation_rows=evaluation_rows)
    step = DistributedStep(
        model,
        job,
        strategy,
        ranks,
        cluster,
        servers,
        where=device(),
        evaluation_rows=evaluation_rows,
        total_examples=total_examples,
    )
    group = ranks.rank // strategy.tensor  # a tensor group draws alike what it computes alike
    if group or strategy.tensor > 1:
        torch.manual_seed(hash((job.seed, group)))
    return step
