"""A log whose training rows have labels that a teacher has softened: knowledge distillation (arXiv 1503.02531).

Binary cross-entropy is linear in its label, so the mean of the losses against the label and against what a teacher
predicts is the loss against the mean of the two. Validation and test keep the labels of the log.

Shapes: N training rows; M rows of training and validation together.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.data.cache import PreparedLog, Split

TEACHER_SHARE = 0.5
"""Share of a teacher's prediction in a label. Half gained on two logs; all of it gained more on the one where
there is little to learn by heart, and lost on the other (docs/log.md)."""


class TaughtLog(PreparedLog):
    """A prepared log, with labels that a teacher has softened."""

    def __init__(self, log: PreparedLog, file: Path) -> None:
        """The log with a teacher's predictions, which `save_teacher` has written.

        Raises:
            UserError: where they are missing, or are not those of the log's training rows.
        """
        super().__init__(log.directory, log.manifest)
        self._log = log
        labels_N = np.asarray(log.split("train").labels)
        taught_N = _read(file, len(labels_N), log.manifest.rows["validation"])
        self._labels_N = (1.0 - TEACHER_SHARE) * labels_N + np.float32(TEACHER_SHARE) * taught_N

    def split(self, name: str) -> Split:
        """Returns a split; labels of `train` are softened."""
        split = self._log.split(name)
        return dataclasses.replace(split, labels=self._labels_N) if name == "train" else split


def save_teacher(probability_M: NDArray[np.float32], file: Path) -> None:
    """Writes what a teacher predicts for the training rows, and after them those of validation, for networks that
    are trained on both, in the order of the log; whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, probability_M.astype(np.float32))


def _read(file: Path, rows: int, validation_rows: int) -> NDArray[np.float32]:
    if not file.exists():
        raise UserError(
            f"{file}: what the teacher predicts is gone, so a network that learnt from it cannot be trained "
            "again. Networks that learnt from labels alone can; `distil=no` leaves the others out."
        )
    taught_M: NDArray[np.float32] = np.load(file, mmap_mode="r", allow_pickle=False)
    if taught_M.shape not in ((rows,), (rows + validation_rows,)):
        raise UserError(f"{file} has {taught_M.shape} predictions, and the log has {rows} training rows.")
    return taught_M[:rows]
