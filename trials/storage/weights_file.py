"""Weights on disk as safetensors: written atomically, read back into a model strictly.

Optimizer state may be beside them.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dhen.atomic_write import atomic_file
from dhen.errors import UserError

Weights = dict[str, Tensor]
OPTIMIZER = "optimizer."
"""Beginning of the names of optimizer state (`trials.checkpoint.optimizer_state`)."""


def save_weights(weights: Weights, path: Path) -> None:
    """Writes a file that is whole or not there."""
    with atomic_file(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)


def read_weights(path: Path) -> Weights:
    """Reads a file's weights, without the optimizer state that may be beside them.

    Raises:
        UserError: when the file is missing or damaged.
    """
    return {name: tensor for name, tensor in read_all(path).items() if not name.startswith(OPTIMIZER)}


def read_optimizer_state(path: Path) -> Weights:
    """Reads the optimizer state that is beside a file's weights; empty where there is none.

    Raises:
        UserError: when the file is missing or damaged.
    """
    return {name: tensor for name, tensor in read_all(path).items() if name.startswith(OPTIMIZER)}


def read_all(path: Path) -> Weights:
    """Reads a file's weights and the optimizer state beside them.

    Raises:
        UserError: when the file is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no readable weights ({error}).") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Puts a file's weights into a model.

    Raises:
        UserError: when the file is missing, damaged, or of another model.
    """
    try:
        model.load_state_dict(read_weights(path), strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: the weights are of another model: {reason}") from None
