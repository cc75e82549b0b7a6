"""What holds the dense part of a model while it trains: every strategy has an engine of this kind."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from trials.checkpoint.dcp_vectors import FlatPieces
from trials.distributed.table_split import DenseInputs
from trials.optim.clip import Clip
from trials.storage.weights_file import Weights


class Engine(Protocol):
    """What holds the dense state under one strategy."""

    module: nn.Module
    """The wrapped model: `DenseInputs` -> logit_B, or logit_BK of members in training."""
    optimizer: Optimizer
    """The optimizer of this rank's part, or of what it has a part in; its first group's learning rate counts."""

    clip: Clip
    """What clips the gradients before each update."""

    def predict(self, inputs: DenseInputs) -> Tensor:
        """Returns logit_B without gradients, of the model in the mode (evaluation or training) that it is in; a
        collective."""

    def accumulate_only(self, yes: bool) -> None:
        """Sets whether the next backward leaves ranks apart, because another micro-batch follows."""

    def update(self) -> None:
        """Updates the weights by AdamW, from the gradients of all ranks."""

    def is_finite(self) -> bool:
        """Tells whether no weight that this rank updates is NaN or infinite."""

    def weights(self) -> Weights:
        """Returns a copy of all weights under the plain model's names, fp32 on the CPU; a collective.

        Only the first rank has them; the result is empty on other ranks.
        """

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns weights and optimizer state that this rank holds, to save; with `saved`, to load what a
        checkpoint has under these names into (`restored`)."""

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`: weights and optimizer state after so many updates; a
        collective."""
