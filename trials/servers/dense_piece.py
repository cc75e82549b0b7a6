"""The dense part of a model on servers, for workers that train on their own: each server has a piece of it.

All dense weights lie one after another (`trials.optim.master_weights`), and server k of N has the k-th of N pieces
that are equal up to one. A worker pulls all pieces, computes, and pushes the gradients of each; the server's AdamW
updates its piece from each push on its own (Downpour SGD, NIPS 2012, with AdamW in place of SGD).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trials.job import TrainingConfig
from trials.optim.adamw import adamw, moments, set_steps
from trials.ranks import rank_slice
from trials.servers.shares import Share
from trials.storage.weights_file import Weights

DENSE, STEPS = "dense.", "dense.steps"
"""Names in a server's file: of weights and moments, and of the number of updates."""
WEIGHT = f"{DENSE}weight"


def piece(numbers: int, share: Share) -> slice:
    """Returns which of so many dense weights a server has."""
    return rank_slice(numbers, share.server, share.servers)


class DensePiece:
    """A server's piece of the dense weights, with AdamW's moments."""

    def __init__(self, flat: Tensor, share: Share, config: TrainingConfig) -> None:
        """Keeps its piece of all dense weights, in fp32."""
        self._share = share
        self._piece = nn.Parameter(flat.detach()[piece(len(flat), share)].clone())
        self._optimizer = adamw([self._piece], config)
        self._steps = 0

    @property
    def weight(self) -> Tensor:
        """The weights, in fp32."""
        return self._piece.detach()

    def update(self, gradient: Tensor, rate: float) -> None:
        """Runs AdamW on a gradient of the piece."""
        self._piece.grad = gradient.clone()
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._piece.grad = None
        self._steps += 1

    def state(self) -> Weights:
        """Returns weights and moments, to save."""
        named = {WEIGHT: self.weight, STEPS: torch.tensor(self._steps)}
        return named | {
            f"{DENSE}{name}": values for name, values in moments(self._optimizer, self._piece).items()
        }

    @torch.no_grad()
    def load(self, files: Sequence[Weights]) -> None:
        """Takes over what servers have saved, however many they were."""
        numbers = sum(len(file[WEIGHT]) for file in files)
        mine = piece(numbers, self._share)
        held = {WEIGHT: self.weight}
        held |= {f"{DENSE}{name}": values for name, values in moments(self._optimizer, self._piece).items()}
        for name, values in held.items():
            values.copy_(torch.cat([file[name] for file in files])[mine])
        self._steps = int(files[0][STEPS])
        set_steps(self._optimizer, self._piece, self._steps)
