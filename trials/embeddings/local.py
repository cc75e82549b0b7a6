"""Tables of one process, whole on its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dhen.batch import FeatureBatch
from dhen.inputs.features import Tables, matrices
from trials.embeddings.blocks import State, load_state, state_of, state_to_load, whole_blocks
from trials.embeddings.engine import backward, leaves
from trials.embeddings.fp16 import in_half
from trials.embeddings.growing import Begun, begin_rows
from trials.job import TrainingConfig
from trials.optim.rowwise_adagrad import RowWiseAdagrad


class LocalTables:
    """A `TableEngine` of one process, with one matrix for each embedding length."""

    def __init__(self, tables: Tables, config: TrainingConfig) -> None:
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
        self._rate, self._lazy = config.embedding_learning_rate, bool(config.table_decay)
        self._looked_up: list[Tensor] = []
        self._held = whole_blocks(list(self._matrices.values()), self._optimizer)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights, of sums, and of what the optimizer keeps beside them."""
        state = [values for weight in self._weights for values in self._optimizer.state_of(weight).values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._weights, *state))

    def lookup(self, features: FeatureBatch, begun: Begun | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`."""
        if self._lazy:
            for matrix in self._matrices.values():
                self._optimizer.catch_up(matrix.weight, matrix.rows(features))
        begin_rows(self._held, begun)
        looked_up = self._tables(features)
        self._looked_up = looked_up if torch.is_grad_enabled() else []
        return leaves(looked_up)

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """See `TableEngine`."""
        backward(self._looked_up, embeddings)
        self._looked_up = []
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None

    def scale_learning_rate(self, factor: float) -> None:
        """See `TableEngine`."""
        self._optimizer.param_groups[0]["lr"] = self._rate * factor

    def settle(self) -> None:
        """See `TableEngine`."""
        if self._lazy:
            self._optimizer.settle()

    def full_weights(self) -> dict[str, Tensor] | None:
        """See `TableEngine`."""
        self.settle()
        weights = {name: matrix.weight.detach() for name, matrix in self._matrices.items()}
        return {name: weight.to("cpu", torch.float32, copy=True) for name, weight in weights.items()}

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """See `TableEngine`; also holds what makes a resumed training equal to the bit."""
        self.settle()
        parts = state_of(self._held) if saved is None else state_to_load(saved, self._held)
        return parts | self._optimizer.progress(saved)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `TableEngine`."""
        load_state(state, self._held)
        self._optimizer.go_on(state)
