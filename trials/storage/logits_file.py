"""Logits of a split on disk: an array of NumPy, whole or not there, with a digest behind it that is checked when
they are read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dhen.atomic_write import atomic_file
from dhen.errors import UserError

REMEDY = "Restore the file from a copy, or delete it: the study's next command scores the split again."


def write_logits(logit_N: NDArray[np.float32], path: Path) -> None:
    """Writes logits; `numpy.load` reads the file too."""
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, logit_N)
        file.write(_digest(logit_N))


def read_logits(path: Path) -> NDArray[np.float32]:
    """Reads logits (N), mapped into memory.

    Raises:
        UserError: when the file is missing or damaged.
    """
    try:
        # torch warns of arrays that cannot be written; what is written to this one never reaches the file
        logit_N: NDArray[np.float32] = np.load(path, mmap_mode="c", allow_pickle=False)
        with path.open("rb") as file:
            file.seek(logit_N.offset + logit_N.nbytes)  # type: ignore[attr-defined]
            noted = file.read()
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: no readable predictions ({error}). {REMEDY}") from None
    if noted not in (b"", _digest(logit_N)):  # none of those that an earlier version wrote
        raise UserError(f"{path} is damaged: its predictions are not those that were written. {REMEDY}")
    return logit_N


def _digest(logit_N: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(logit_N).data).digest()
