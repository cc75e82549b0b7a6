"""Embedding tables while they train: looked up apart from the dense part, updated from its gradients.

`LocalTables` holds them all in one process; `trials.embeddings.sharded` spreads them over ranks. Embeddings go to
the dense part as leaves (`trials.distributed.table_split`), whose gradients `update` carries on with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.inputs.features import Tables, matrices
from dhen.schema import FeatureSchema
from trials.embeddings.blocks import State, load_state, state_of, state_to_load, whole_blocks
from trials.embeddings.fp16 import in_half
from trials.embeddings.requirements import check_tables
from trials.job import TrainingConfig
from trials.memory.limit import on_device_for_good
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.planner.placement import Placement
from trials.ranks import Ranks


class TableEngine(Protocol):
    """All tables of a model, and their optimizer; every rank makes the same calls in the same order."""

    @property
    def held_bytes(self) -> int:
        """Weights and optimizer state on this rank."""

    def lookup(self, features: FeatureBatch) -> tuple[Tensor, ...]:
        """Embeddings of this rank's examples, fp32, as the tables put them out: e_BTD of all categorical ones,
        e_B1D of each multi-hot one, of each length. Leaves that require gradients, but under `no_grad`."""

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """The optimizer's update, from the gradients on what `lookup` returned last.

        They are averaged over ranks: each is the gradient of the mean over its rank's examples (where ranks
        have different numbers of examples, scaled by their share).
        """

    def scale_learning_rate(self, factor: float) -> None:
        """Sets it to a multiple of the configured one, from the next lookup on."""

    def settle(self) -> None:
        """Applies all decay that is due."""

    def full_weights(self) -> dict[str, Tensor] | None:
        """As the tables' `state_dict`: each matrix whole, fp32 on the CPU, a copy; on rank 0 alone."""

    def load_full(self, weights: Mapping[str, Tensor]) -> None:
        """Takes all tables over from such matrices, which every rank is given alike."""

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """This rank's blocks by name (`trials.embeddings.blocks`), to save; to load, what it needs of a checkpoint
        that has the keys `saved`, written by any engine on any number of ranks."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what was loaded into `state_dict(saved)`."""


def table_engine(
    tables: Tables | None,
    schema: FeatureSchema,
    config: TrainingConfig,
    ranks: Ranks,
    placement: Placement | None,
    where: torch.device,
) -> TableEngine | None:
    """The engine for so many ranks; None where a model has no tables.

    Args:
        tables: taken over, and alike on all ranks.
        schema: theirs.
        config: resolved; with what tables are stored in, and sent in.
        ranks: several need a process group that all have joined.
        placement: of the tables on these ranks; one rank needs none.
        where: the device that holds this rank's part; several ranks never hold all tables there.

    Raises:
        UserError: as `check_tables`, which tells before ranks start.
    """
    if tables is None:
        return None
    if ranks.world == 1:
        return LocalTables(on_device_for_good(tables, where), config)
    from trials.embeddings.sharded import ShardedTables

    assert placement is not None
    check_tables(placement, ranks)
    return ShardedTables(tables, schema, config, ranks, placement, where)


class LocalTables:
    """Tables of one process, in one matrix for each length."""

    def __init__(self, tables: Tables, config: TrainingConfig) -> None:
        if config.table_precision == "fp16":
            tables = in_half(tables)
        self._tables, self._matrices = tables, matrices(tables)
        self._weights = [each.weight for each in self._matrices.values()]
        self._optimizer = RowWiseAdagrad(
            self._weights,
            lr=config.embedding_learning_rate,
            decay=config.embedding_decay,
            table_decay=config.table_decay,
        )
        self._rate, self._lazy = config.embedding_learning_rate, bool(config.table_decay)
        self._looked_up: list[Tensor] = []
        self._held = whole_blocks(list(self._matrices.values()), self._optimizer)

    @property
    def held_bytes(self) -> int:
        """Weights, sums, and what the optimizer keeps beside them."""
        state = [held for weight in self._weights for held in self._optimizer.state_of(weight).values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._weights, *state))

    def lookup(self, features: FeatureBatch) -> tuple[Tensor, ...]:
        """As the protocol says."""
        if self._lazy:
            for each in self._matrices.values():
                self._optimizer.catch_up(each.weight, each.rows(features))
        looked_up = self._tables(features)
        self._looked_up = looked_up if torch.is_grad_enabled() else []
        return leaves(looked_up)

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """As the protocol says."""
        backward(self._looked_up, embeddings)
        self._looked_up = []
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None

    def scale_learning_rate(self, factor: float) -> None:
        """As the protocol says."""
        self._optimizer.param_groups[0]["lr"] = self._rate * factor

    def settle(self) -> None:
        """As the protocol says."""
        if self._lazy:
            self._optimizer.settle()

    def full_weights(self) -> dict[str, Tensor] | None:
        """As the protocol says."""
        self.settle()
        weights = {name: each.weight.detach() for name, each in self._matrices.items()}
        return {name: weight.to("cpu", torch.float32, copy=True) for name, weight in weights.items()}

    def load_full(self, weights: Mapping[str, Tensor]) -> None:
        """As the protocol says."""
        self.settle()
        for name, each in self._matrices.items():
            each.weight.detach().copy_(weights[name])

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """As the protocol says; with what makes that which follows equal to the bit."""
        self.settle()
        blocks = state_of(self._held) if saved is None else state_to_load(saved, self._held)
        return blocks | self._optimizer.progress(saved)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As the protocol says."""
        load_state(state, self._held)
        self._optimizer.go_on(state)


def leaves(looked_up: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The same values cut off from the lookup; they require gradients where gradients are recorded."""
    recorded = torch.is_grad_enabled()
    return tuple(e.detach().requires_grad_(recorded) for e in looked_up)


def backward(looked_up: list[Tensor], embeddings: tuple[Tensor, ...]) -> None:
    """Carries the gradients of the leaves on into the lookup."""
    assert looked_up, "an update needs a lookup before it, with gradients recorded"
    torch.autograd.backward(looked_up, [embedding.grad for embedding in embeddings])
