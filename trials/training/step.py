"""One training step of a model, however it is held: what it can do, and that of one process without a strategy."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.inputs.features import FeatureProcessing
from dhen.members import cross_entropy
from dhen.tape import rows_at_once
from trials.data.loader import LabelledBatch
from trials.data.prepared_log import PreparedLog, Split
from trials.optim.adamw import MOMENTS
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks, Strategy
from trials.records.trial_record import Metrics
from trials.store.weights import Weights, changes
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.ddp import DDPEngine
from trials.training.distributed.engine import Engine
from trials.training.embeddings.blocks import State, store_tables_in_half
from trials.training.embeddings.engine import LocalTables, TableEngine
from trials.training.embeddings.growing import KEYS, TABLE_WEIGHTS, GrowingTables
from trials.training.embeddings.levels import CacheUse
from trials.training.evaluation import Keep, logits_over_ranks, metrics_over_ranks
from trials.training.memory_limit import is_counted, on_host
from trials.training.process_group import all_agree

ONE_RANK, PLAIN_DP = Ranks(), Strategy()


class DivergenceError(ArithmeticError):
    """The loss of a step was NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss {loss} at step {step}")
        self.step, self.loss = step, loss


class Step(ABC):
    """A model and its optimizers on this rank; every rank makes the same calls in the same order."""

    model: nn.Module
    _engine: Engine
    """What holds the dense part."""
    _tables: TableEngine | None = None
    _growing: GrowingTables | None = None
    """What gives rows of growing tables to keys, if this rank does."""

    def __init__(self, ranks: Ranks, rows: int, pipeline: int = 1) -> None:
        """Notes, for subclasses that hold the model, the ranks, how many of this rank's rows go forward at once in
        an evaluation, and the number of a pipeline's ranks."""
        self._ranks, self._rows_at_once, self._data = ranks, rows, ranks.data_part(pipeline)
        self._rate: float = self._engine.optimizer.param_groups[0]["lr"]

    @property
    def strategy(self) -> Strategy:
        """The strategy that the model is held with, read from what wraps it."""
        return PLAIN_DP

    @abstractmethod
    def __call__(self, batch: LabelledBatch) -> Tensor:
        """Runs one update on this rank's slice; returns its loss, detached, whose mean over ranks is the
        batch's."""

    @property
    def cache_use(self) -> CacheUse | None:
        """What the cache of tables that lie below the device has done so far; None if there is none."""
        return None

    def ahead(self, batch: LabelledBatch) -> None:  # noqa: B027
        """Is told, before a step, the batch that comes after its own, whose rows may be fetched meanwhile."""

    @property
    def staleness(self) -> dict[int, int] | None:
        """How often the rows of a batch lacked the updates of so many steps; None if no servers hold tables."""
        return None

    def begin_pass(self) -> None:
        """Is called before the first step of each pass."""
        if self._growing is not None:
            self._growing.begin_pass()

    def scale_learning_rates(self, dense: float, tables: float) -> float:
        """Sets learning rates to multiples of the configured ones; returns the dense part's, for the record."""
        if self._tables is not None:
            self._tables.scale_learning_rate(tables)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._rate * dense
        return self._rate * dense

    def finish_update(self) -> None:  # noqa: B027
        """Waits for a delayed update that is under way on the host; a collective."""

    def settle(self) -> None:
        """Brings all table rows up to date; to be called before the model is evaluated or saved."""
        if self._tables is not None:
            self._tables.settle()

    def clipped_steps(self) -> int:
        """Returns the number of steps since the last call whose gradients were clipped; the same on all ranks."""
        return self._engine.clip.clipped_steps()

    def is_finite(self) -> bool:
        """Tells whether no dense weight of any rank is NaN or infinite (ReLU can hide one from the loss)."""
        return all_agree(self._ranks, self._engine.is_finite())

    def evaluate(self, log: PreparedLog, split_name: str, keep: Keep | None = None) -> Metrics:
        """Evaluates on a split of the log, by all ranks; the same on all. `keep` is given the logits on the
        first."""
        split = log.split(split_name)
        return metrics_over_ranks(self.logits(split), split, log, self._ranks, keep)

    def logits(self, split: Split) -> Tensor | None:
        """Returns the logits (N) of a split's rows on the first rank, in the host's memory; None on others."""
        self.model.eval()
        logit_N = logits_over_ranks(self._score, split, self._ranks, self._rows_at_once, self._data)
        self.model.train()
        return logit_N

    @abstractmethod
    def weights(self) -> Weights:
        """Returns a copy of the plain model's weights on the CPU, in fp32; on rank 0, empty on others."""

    def nothing_changed(self) -> None:  # noqa: B027
        """Is told that the state which `changed` will be given next is the model's as it is now."""

    def changed(self, before: Mapping[str, Tensor]) -> Weights:
        """Returns what makes of an earlier state of the model what it is, as `trials.store.weights` has
        it; on rank 0. `before`, on the CPU in fp32, must have all changes that were returned earlier."""
        return changes(before, self.weights())

    def dense_state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns the dense state of this rank, to save it; with `saved`, to load what a checkpoint has under
        these names into, which changes what trains."""
        return self._engine.state(saved)

    def dense_moments(self, steps: int) -> dict[str, FlatPieces]:
        """Returns the dense part's two moments as AdamW would have them after so many steps, on this rank; a
        collective."""
        state = self.dense_state()
        return {name: state[name] for name in MOMENTS}

    def table_state(self, saved: Collection[str] | None = None) -> State:
        """Returns this rank's tables, to save them; with `saved`, what it needs of a checkpoint that has these
        keys."""
        state = self._tables.state_dict(saved) if self._tables is not None else {}
        return state | (self._growing.state() if self._growing is not None else {})

    def restored(self, tables: State, steps: int) -> None:
        """Takes over what was loaded into `dense_state()` and `table_state(saved)`, after so many steps."""
        self._engine.restored(steps)
        if self._tables is not None:
            self._tables.load_state_dict(tables)
        if self._growing is not None:
            self._growing.restored()

    def save_tables(self, folder: Path) -> None:  # noqa: B027
        """Has servers write their tables into a folder, if servers hold them; a collective."""

    def go_on_with_tables(self, steps: int, folder: Path | None) -> None:  # noqa: B027
        """Has servers go on after so many steps, with what they wrote into a folder or, without one, as they
        are; a collective."""

    @abstractmethod
    def _score(self, features: FeatureBatch) -> Tensor:
        """Returns logit_B without gradients; a collective."""


class TrainStep(Step):
    """The step of one process: fused AdamW on the dense part, row-wise Adagrad on the tables, nothing wrapped."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, *, evaluation_rows: int | None = None
    ) -> None:
        """Takes the model over; `config` must be resolved. `evaluation_rows` go forward at once in an evaluation;
        None: `rows_at_once`."""
        assert not config.frequency_decay, (
            "this step looks embeddings up where their gradients cannot be reached"
        )
        self.model = model
        most = rows_at_once(model)
        if is_counted():
            most = min(config.batch_size or most, most)
        if config.table_precision == "fp16":
            store_tables_in_half(model)
        on_gpu = next(model.parameters()).device.type != "cpu"  # if layers may be compiled
        self._engine = DDPEngine(model, PLAIN_DP, config, aligned=on_gpu)
        features = model.features
        assert isinstance(features, FeatureProcessing)
        self._local = None if features.tables is None else LocalTables(features.tables, config)
        self._tables = self._local
        if features.growing is not None:
            self._growing = GrowingTables(features.growing, ONE_RANK)
        super().__init__(ONE_RANK, evaluation_rows or most)

    def __call__(self, batch: LabelledBatch) -> Tensor:
        """Runs one update; returns the batch's loss, detached."""
        features, begun = batch.features, None
        if self._growing is not None:
            features, begun = self._growing.admit(features, batch.time)
        if self._local is not None:
            self._local.prepare(features, begun)
        loss = cross_entropy(self.model(features), batch.label_B, batch.weight_B)
        loss.backward()  # type: ignore[no-untyped-call]
        self._engine.update()
        if self._local is not None:
            self._local.step()
        return loss.detach()

    def weights(self) -> Weights:
        """See `Step`."""
        return {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in self._engine.weights().items()
        }

    @torch.no_grad()
    def _score(self, features: FeatureBatch) -> Tensor:
        logit_B: Tensor = self.model(features)
        return logit_B


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

    def __init__(self, step: Step, evaluations: int) -> None:
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

    def state(self) -> Iterator[tuple[dict[str, FlatPieces], State]]:
        """Yields for a checkpoint the dense weights and the table parts of each set in the mean, oldest first."""
        dense = self._step.dense_state()[WEIGHT]
        for noted in self._noted:
            pieces = (Piece(start, noted[f"{WEIGHT}{start}"]) for start, _ in dense.pieces)
            table_parts = {name: tensor for name, tensor in noted.items() if name.startswith(TABLE_WEIGHTS)}
            yield {WEIGHT: FlatPieces(dense.length, tuple(pieces))}, table_parts

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


def _held(step: Step) -> dict[str, Tensor]:
    """Returns all weights of this rank, as views of what trains: the dense part's by where they begin, and the
    tables' parts."""
    dense = {f"{WEIGHT}{start}": values for start, values in step.dense_state()[WEIGHT].pieces}
    return dense | {name: t for name, t in step.table_state().items() if name.startswith(TABLE_WEIGHTS)}
