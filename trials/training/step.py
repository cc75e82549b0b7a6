"""One training step of a model, however it is held: what it can do, and how a fresh one is made."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dhen.batch import FeatureBatch
from dhen.inputs.growing import part_of_tables
from dhen.members import cross_entropy
from dhen.model import build_model
from dhen.tape import rows_at_once
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.loader import Batch
from trials.data.prepared_log import PreparedLog, Split
from trials.optim.adamw import (
    MOMENTS,
    Clip,
    MasterWeights,
    adamw,
    all_finite,
    embedding_tables,
    moments,
    set_steps,
)
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.planner.ladder import check_together
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy
from trials.records.trial_record import Metrics
from trials.store.weights import Weights, changes, with_own
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.checkpointer import Resumable
from trials.training.distributed.engine import TABLES
from trials.training.distributed_step import DistributedStep
from trials.training.embeddings.blocks import (
    HeldBlock,
    State,
    load_state,
    state_of,
    state_to_load,
    store_tables_in_half,
    whole_blocks,
)
from trials.training.embeddings.growing import GrowingTables, begin_rows, growing_rows
from trials.training.embeddings.levels import CacheUse
from trials.training.evaluation import evaluate, split_logits
from trials.training.memory_limit import is_counted, on_device_for_good, on_host
from trials.training.servers.client import Servers

# One training step: forward, cross-entropy, backward, the update of the dense part and of the tables.


class TrainStep:
    """A model and its optimizers: fused AdamW on the dense part, row-wise Adagrad on the tables."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, *, evaluation_rows: int | None = None
    ) -> None:
        """Takes the model over; `config` must be resolved. `evaluation_rows` go forward at once in an evaluation;
        None: `rows_at_once`."""
        assert config.precision != "auto"
        assert not config.frequency_decay, (
            "this step looks embeddings up where their gradients cannot be reached"
        )
        self.model = model
        most = rows_at_once(model)
        self._rows_at_once = evaluation_rows or (
            min(config.batch_size or most, most) if is_counted() else most
        )
        if config.table_precision == "fp16":
            store_tables_in_half(model)
        on_gpu = next(model.parameters()).device.type != "cpu"  # where layers may be compiled
        self._master = MasterWeights(model, config.precision, aligned=on_gpu)
        self._dense, self._clip = adamw([self._master.flat], config), Clip(config.clip_norm)
        self._tables = embedding_tables(model)
        self._sparse = (
            RowWiseAdagrad(
                [table.weight for table in self._tables],
                lr=config.embedding_learning_rate,
                decay=config.embedding_decay,
                table_decay=config.table_decay,
            )
            if self._tables
            else None
        )
        self._lazy = bool(self._tables and config.table_decay)
        rows = growing_rows(model)
        self._growing = GrowingTables(rows, Ranks()) if rows is not None else None
        self._parts = self._held() if self._growing is not None else []
        self._optimizers: list[Optimizer] = [self._dense, *([self._sparse] if self._sparse else [])]
        self._initial_rates: list[float] = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]

    @property
    def strategy(self) -> Strategy:
        """Plain DP: nothing wraps the model."""
        return Strategy()

    def __call__(self, batch: Batch) -> Tensor:
        """Runs one update; returns the batch's loss, detached."""
        features, begun = batch.features, None
        if self._growing is not None:
            features, begun = self._growing.admit(features, batch.time)
        if self._lazy:
            self._catch_up(features)
        begin_rows(self._parts, begun)
        loss = cross_entropy(self.model(features), batch.label_B, batch.weight_B)
        loss.backward()  # type: ignore[no-untyped-call]
        self._master.gather_gradients()
        self._clip([self._master.flat.grad])
        for optimizer in self._optimizers:
            optimizer.step()
        self._master.publish()
        for table in self._tables:
            table.weight.grad = None
        return loss.detach()

    @property
    def cache_use(self) -> None:
        """None: all tables are on the device."""
        return None

    def ahead(self, batch: Batch) -> None:
        """Does nothing: all tables are here."""

    @property
    def staleness(self) -> None:
        """None: rows have all updates."""
        return None

    def begin_pass(self) -> None:
        """Is called before the first step of each pass."""
        if self._growing is not None:
            self._growing.begin_pass()

    def scale_learning_rates(self, dense: float, tables: float) -> float:
        """Sets learning rates to multiples of the configured ones; returns the dense part's, for the record."""
        rates = zip(self._optimizers, self._initial_rates, strict=True)
        for (optimizer, rate), factor in zip(rates, (dense, tables), strict=False):
            optimizer.param_groups[0]["lr"] = rate * factor
        return self._initial_rates[0] * dense

    def settle(self) -> None:
        """Brings all table rows up to date; to be called before the model is evaluated or saved."""
        if self._lazy and self._sparse is not None:
            self._sparse.settle()

    def clipped_steps(self) -> int:
        """Returns the number of steps since the last call whose gradients were clipped."""
        return self._clip.clipped_steps()

    def is_finite(self) -> bool:
        """Whether no dense weight is NaN or infinite (ReLU can hide one from the loss)."""
        return all_finite(self._master.flat)

    def weights(self) -> Weights:
        """Returns a copy of the model's weights on the CPU, in fp32."""
        return {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in self._master.weights().items()
        }

    def nothing_changed(self) -> None:
        """Does nothing: states are compared whole."""

    def changed(self, before: Mapping[str, Tensor]) -> Weights:
        """Returns what makes of an earlier state of the model what it is."""
        return changes(before, self.weights())

    def evaluate(self, log: PreparedLog, split_name: str) -> Metrics:
        """Evaluates on a split of the log."""
        return evaluate(self.model, log, split_name, self._rows_at_once)

    def logits(self, split: Split) -> Tensor:
        """Returns the logits (N) of all rows of a split, in the host's memory, as `evaluate` has them."""
        with torch.no_grad():
            return split_logits(self.model, split, self._rows_at_once)

    def dense_state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns weights and AdamW's moments, for `trials.training.checkpointer`, to save or to load into."""
        length, ranges = self._master.length, self._master.ranges
        vectors = {"weight": self._master.flat.detach()} | moments(self._dense, self._master.flat)
        return {
            name: FlatPieces(length, tuple(Piece(start, values[place]) for start, place in ranges))
            for name, values in vectors.items()
        }

    def dense_moments(self, steps: int) -> dict[str, FlatPieces]:
        """Returns AdamW's two moments after so many steps."""
        state = self.dense_state()
        return {name: state[name] for name in MOMENTS}

    def table_state(self, saved: Collection[str] | None = None) -> State:
        """Returns the tables' weights and optimizer state, to save; with `saved`, what to take of a checkpoint's
        keys."""
        self.settle()
        parts = state_of(self._held()) if saved is None else state_to_load(saved, self._held())
        parts |= self._growing.state() if self._growing is not None else {}
        return parts | (self._sparse.progress(saved) if self._sparse is not None else {})

    def restored(self, tables: State, steps: int) -> None:
        """Takes over what was loaded into `dense_state()` and `table_state(saved)`, as they were after so many
        steps."""
        set_steps(self._dense, self._master.flat, steps)
        self._master.publish()
        load_state(tables, self._held())
        if self._growing is not None:
            self._growing.restored()
        if self._sparse is not None:
            self._sparse.go_on(tables)

    def save_tables(self, folder: Path) -> None:
        """Does nothing: tables are part of `table_state`."""

    def go_on_with_tables(self, steps: int, folder: Path | None) -> None:
        """Does nothing: tables are part of `table_state`."""

    def _held(self) -> list[HeldBlock]:
        """Each table whole, as views."""
        sparse = self._sparse
        return [] if sparse is None else whole_blocks(self._tables, sparse)

    def _catch_up(self, features: FeatureBatch) -> None:
        assert self._sparse is not None
        for table in self._tables:
            self._sparse.catch_up(table.weight, table.rows(features))


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
        """What the cache of tables that lie below the device has done so far; None if there is none."""

    def ahead(self, batch: Batch) -> None:
        """Is told, before a step, the batch that comes after its own, whose rows may be fetched meanwhile."""

    @property
    def staleness(self) -> dict[int, int] | None:
        """How often the rows of a batch lacked the updates of so many steps; None if no servers hold tables."""

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
        """Returns what makes of an earlier state of the model what it is, as `trials.store.weights` has
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
