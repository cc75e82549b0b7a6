"""Embedding tables while they train: looked up apart from the dense part, updated from its gradients.

`trials.embeddings.local` holds them all in one process; `trials.embeddings.sharded` spreads them over ranks. The
dense part is given embeddings as leaves (`trials.distributed.table_split`), and `update` carries on with the
gradients on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dhen.batch import FeatureBatch
from trials.embeddings.blocks import State
from trials.embeddings.growing import Begun


class TableEngine(Protocol):
    """All tables of a model, and their optimizer; every rank makes the same calls in the same order."""

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""

    def lookup(self, features: FeatureBatch, begun: Begun | None = None) -> tuple[Tensor, ...]:
        """Returns embeddings of this rank's examples in fp32, as the tables put them out; the rows in `begun` have
        begun anew first."""

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """Runs the optimizer's update, from the gradients on what `lookup` returned last.

        They are averaged over ranks: each is the gradient of the mean over its rank's examples (where ranks
        have different numbers of examples, scaled by their share).
        """

    def scale_learning_rate(self, factor: float) -> None:
        """Sets the learning rate to a multiple of the configured one, from the next lookup on."""

    def settle(self) -> None:
        """Applies all decay that is due."""

    def full_weights(self) -> dict[str, Tensor] | None:
        """Returns the tables' `state_dict` on rank 0 alone: each matrix whole, fp32 on the CPU, a copy."""

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """Returns this rank's table parts by name (`trials.embeddings.blocks`), to save them; with `saved`, what
        it needs of a checkpoint that has these keys, written by any engine on any number of ranks."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what was loaded into `state_dict(saved)`."""


def leaves(looked_up: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Returns the same values cut off from the lookup; they require gradients where gradients are recorded."""
    recorded = torch.is_grad_enabled()
    return tuple(e.detach().requires_grad_(recorded) for e in looked_up)


def backward(looked_up: list[Tensor], embeddings: tuple[Tensor, ...]) -> None:
    """Carries the gradients of the leaves on into the lookup; the leaves have none afterwards, so that their
    memory is there for the update."""
    assert looked_up, "an update needs a lookup before it, with gradients recorded"
    torch.autograd.backward(looked_up, [embedding.grad for embedding in embeddings])
    for embedding in embeddings:
        embedding.grad = None
