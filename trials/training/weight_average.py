"""The mean of a training's weights at its last K evaluations, tried at each beside the weights themselves.

Latest weight averaging (arXiv 2209.14981): as in SWA (arXiv 1803.05407) points along one training are averaged,
but the newest K, so that nothing has to be known of when the training will end. The training itself goes on
from its own weights. Dense part and tables are averaged: the dense part alone, with tables that it was not trained
with, gained less (docs/log.md). No batch statistics have to be made anew: networks here have none.

A row of a growing table that has gone to another key meanwhile has the mean since then.

Each rank averages what it holds, whatever the strategy, in host memory: K copies of its weights as they are
stored, none on the device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from trials.checkpoint.checkpointer import Resumable
from trials.checkpoint.dcp_vectors import FlatPieces, Piece
from trials.embeddings.growing import KEYS, TABLE_WEIGHTS
from trials.memory.limit import on_host

WEIGHT = "weight"
"""Name of weights in a step's dense state, and before the dot in its table state."""


class WeightAverage:
    """The average of one step's weights; every rank makes the same calls in the same order."""

    def __init__(self, step: Resumable, evaluations: int) -> None:
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

    def state(self) -> Iterator[tuple[FlatPieces, dict[str, Tensor]]]:
        """Yields for a checkpoint the dense weights and the table parts of each set in the mean, oldest first."""
        dense = self._step.dense_state()[WEIGHT]
        for noted in self._noted:
            pieces = (Piece(start, noted[f"{WEIGHT}{start}"]) for start, _ in dense.pieces)
            table_parts = {name: tensor for name, tensor in noted.items() if name.startswith(TABLE_WEIGHTS)}
            yield FlatPieces(dense.length, tuple(pieces)), table_parts

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


def _held(step: Resumable) -> dict[str, Tensor]:
    """Returns all weights of this rank, as views of what trains: the dense part's by where they begin, and the
    tables' parts."""
    dense = {f"{WEIGHT}{start}": values for start, values in step.dense_state()[WEIGHT].pieces}
    return dense | {name: t for name, t in step.table_state().items() if name.startswith(TABLE_WEIGHTS)}
