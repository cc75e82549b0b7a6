"""Embedding tables while they train: looked up apart from the dense part, updated from its gradients.

`LocalTables` holds them all in one process; `trials.training.embeddings.sharded` spreads them over ranks.
`ReplicatedTables` are small ones that every rank holds whole: looked up without a transfer, kept equal by
averaging gradients. The dense part is given embeddings as leaves (`trials.training.distributed.engine`), and
`update` carries on with the gradients on them.

The gradient of a replicated table is dense, one number for each weight, so that one all-reduce is all there is.
The update is row-wise Adagrad's of `trials.optim.rowwise_adagrad`: a row that no rank looked up has no gradient
and stays. Tables in fp16 are rounded with the same random bits on all ranks.

Shapes: B examples, T categorical tables, N ids looked up, R rows of a matrix, D dimension of embeddings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.inputs.features import EmbeddingTables, Tables, matrices
from dhen.schema import FeatureSchema
from trials.optim.rowwise_adagrad import EPSILON, RowWiseAdagrad, StochasticRounding
from trials.records.job import TrainingConfig
from trials.training.embeddings.blocks import (
    HalfTables,
    State,
    blocks_of,
    in_half,
    load_state,
    state_of,
    state_to_load,
)
from trials.training.embeddings.growing import NewRows, begin_rows


class TableEngine(ABC):
    """All tables of a model, and their optimizer; every rank makes the same calls in the same order."""

    def __init__(self, config: TrainingConfig) -> None:
        """Notes the tables' learning rate."""
        self._rate = self._configured_rate = config.embedding_learning_rate
        self._looked_up: list[Tensor] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return 0

    @abstractmethod
    def lookup(self, features: FeatureBatch, begun: NewRows | None = None) -> tuple[Tensor, ...]:
        """Returns embeddings of this rank's examples in fp32, as the tables put them out; the rows in `begun` have
        begun anew first."""

    @abstractmethod
    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """Runs the optimizer's update, from the gradients on what `lookup` returned last.

        They are averaged over ranks: each is the gradient of the mean over its rank's examples (if ranks
        have different numbers of examples, scaled by their share).
        """

    def scale_learning_rate(self, factor: float) -> None:
        """Sets the learning rate to a multiple of the configured one, from the next lookup on."""
        self._rate = self._configured_rate * factor

    @abstractmethod
    def settle(self) -> None:
        """Applies all decay that is due."""

    @abstractmethod
    def full_weights(self) -> dict[str, Tensor] | None:
        """Returns the tables' `state_dict` on rank 0 alone: each matrix whole, fp32 on the CPU, a copy."""

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """Returns this rank's table parts by name (`trials.training.embeddings.blocks`), to save them; with
        `saved`, what it needs of a checkpoint that has these keys, written by any engine on any number of ranks.
        Nothing if tables are saved by somebody else."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes over what was loaded into `state_dict(saved)`."""

    def _backward(self, embeddings: tuple[Tensor, ...]) -> None:
        """Carries the gradients of the leaves on into the lookup; the leaves have none afterwards, so that their
        memory is there for the update."""
        assert self._looked_up, "an update needs a lookup before it, with gradients recorded"
        torch.autograd.backward(self._looked_up, [embedding.grad for embedding in embeddings])
        for embedding in embeddings:
            embedding.grad = None
        self._looked_up = []


def leaves(looked_up: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Returns the same values cut off from the lookup; they require gradients if gradients are recorded."""
    recorded = torch.is_grad_enabled()
    return tuple(e.detach().requires_grad_(recorded) for e in looked_up)


class LocalTables(TableEngine):
    """The tables of one process, with one matrix for each embedding length."""

    def __init__(self, tables: Tables, config: TrainingConfig) -> None:
        super().__init__(config)
        if config.table_precision == "fp16":
            tables = in_half(tables)
        self._tables, self._matrices = tables, matrices(tables)
        self._weights = [matrix.weight for matrix in self._matrices.values()]
        self._optimizer = RowWiseAdagrad(
            self._weights,
            lr=config.embedding_learning_rate,
            decay=config.embedding_decay,
            table_decay=config.table_decay,
        )
        self._lazy = bool(config.table_decay)
        sums = [self._optimizer.state_of(weight)["sum"] for weight in self._weights]
        self._held = blocks_of(self._matrices.values(), sums)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights, of sums, and of what the optimizer keeps beside them."""
        state = [values for weight in self._weights for values in self._optimizer.state_of(weight).values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._weights, *state))

    def lookup(self, features: FeatureBatch, begun: NewRows | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`."""
        self.prepare(features, begun)
        looked_up = self._tables(features)
        self._looked_up = looked_up if torch.is_grad_enabled() else []
        return leaves(looked_up)

    def prepare(self, features: FeatureBatch, begun: NewRows | None) -> None:
        """Applies the decay that is due of rows that will be read, and begins rows anew."""
        if self._lazy:
            for matrix in self._matrices.values():
                self._optimizer.catch_up(matrix.weight, matrix.rows(features))
        begin_rows(self._held, begun)

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """See `TableEngine`."""
        self._backward(embeddings)
        self.step()

    def step(self) -> None:
        """Updates the tables from the gradients of their weights, which are freed."""
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None

    def scale_learning_rate(self, factor: float) -> None:
        """See `TableEngine`."""
        super().scale_learning_rate(factor)
        self._optimizer.param_groups[0]["lr"] = self._rate

    def settle(self) -> None:
        """See `TableEngine`."""
        if self._lazy:
            self._optimizer.settle()

    def full_weights(self) -> dict[str, Tensor] | None:
        """See `TableEngine`."""
        self.settle()
        return {
            name: matrix.weight.detach().to("cpu", torch.float32, copy=True)
            for name, matrix in self._matrices.items()
        }

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """See `TableEngine`; also holds what makes a resumed training equal to the bit."""
        self.settle()
        parts = state_of(self._held) if saved is None else state_to_load(saved, self._held)
        return parts | self._optimizer.progress(saved)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `TableEngine`."""
        load_state(state, self._held)
        self._optimizer.go_on(state)


class ReplicatedTables:
    """Some tables of a schema, all of one embedding length, on every rank; weights are zero until they are
    loaded."""

    def __init__(
        self,
        schema: FeatureSchema,
        names: frozenset[str],
        dim: int,
        ranks: int,
        device: torch.device,
        rounding: StochasticRounding | None,
    ) -> None:
        """`rounding` is that of fp16 tables, at the same count on all ranks; None for fp32."""
        indices = [index for index, table in enumerate(schema.tables) if table.name in names]
        self._ranks, self._rounding = ranks, rounding
        with torch.random.fork_rng(devices=[]):  # drawn numbers would change those that others draw
            tables = EmbeddingTables(schema, dim, indices)
        torch.nn.init.zeros_(tables.weight)
        tables = tables.to(device)
        self.names = tuple(table.name for table in tables.tables)
        self._tables = tables if rounding is None else HalfTables(tables)
        self._sum_R = torch.zeros(len(self._tables.weight), device=device)
        self.held = blocks_of([self._tables], [self._sum_R])

    def lookup(self, features: FeatureBatch) -> dict[str, Tensor]:
        """Returns e_BD of each table, by name."""
        embeddings = self._tables(features)
        by_table = [e_BD for e_BTD in embeddings for e_BD in e_BTD.unbind(1)]
        return dict(zip(self.names, by_table, strict=True))

    @torch.no_grad()
    def update(self, rate: float, decay: float) -> None:
        """Averages all ranks' gradients and runs the optimizer; `decay` is L2 of the rows that were looked up."""
        weight_RD = self._tables.weight
        gradient = weight_RD.grad
        assert gradient is not None
        rows, values_ND = gradient._indices()[0], gradient._values()
        gradient_RD = torch.zeros_like(weight_RD, dtype=torch.float32).index_add_(0, rows, values_ND)
        weight_RD.grad = None
        dist.all_reduce(gradient_RD.div_(self._ranks))
        if decay:
            touched_R = torch.zeros_like(self._sum_R).index_fill_(0, rows, 1.0)
            dist.all_reduce(touched_R, dist.ReduceOp.MAX)
            gradient_RD.addcmul_(weight_RD.float(), touched_R.unsqueeze(1), value=decay)
        self._sum_R.add_(torch.linalg.vector_norm(gradient_RD, dim=1).square_(), alpha=1 / weight_RD.shape[1])
        scale_R = self._sum_R.sqrt().add_(EPSILON).reciprocal_().mul_(rate)
        step_RD = gradient_RD.mul_(scale_R.unsqueeze(1))
        if self._rounding is None:
            weight_RD.sub_(step_RD)
            return
        every_row = torch.arange(len(weight_RD), device=weight_RD.device)
        self._rounding.write(weight_RD, every_row, step_RD.neg_().add_(weight_RD))
