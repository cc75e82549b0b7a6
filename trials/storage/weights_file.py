"""Weights on disk as safetensors: written atomically, read back into a model strictly.

Optimizer state may be beside them.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dhen.atomic_write import atomic_file
from dhen.errors import UserError

Weights = dict[str, Tensor]
_DTYPES = {"F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
"""The types that weights have, as files name them."""
DIGEST = "sha256"
"""Name of the digest in a file's header: of all tensors, in the order of their names."""
OPTIMIZER = "optimizer."
"""Beginning of the names of optimizer state (`trials.checkpoint.optimizer_state`)."""


def save_weights(weights: Weights, path: Path) -> None:
    """Writes a file that is whole or not there, with a digest in its header that is checked when it is read."""
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    with atomic_file(path) as temporary:
        save_file(whole, temporary, {DIGEST: _digest(whole)})


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
        weights = load_file(path)
        with safe_open(path, "pt") as file:
            noted = (file.metadata() or {}).get(DIGEST)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no readable weights ({error}).") from None
    if noted not in (None, _digest(weights)):  # none in a file that an earlier version wrote
        raise UserError(
            f"{path} is damaged: its weights are not those that were written. Restore it from a copy, or train "
            "the model again."
        )
    return weights


def _digest(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def stored_numbers(path: Path) -> int:
    """Returns how many numbers a file's weights have, by its header alone.

    Raises:
        UserError: when the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.offset_keys() if not name.startswith(OPTIMIZER)]
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no readable weights ({error}).") from None


def named_tensor(weights: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    """Returns the tensor of a file that has this name.

    Raises:
        UserError: where the file has none.
    """
    if name not in weights:
        raise UserError(f"{path}: has no tensor {name!r}.")
    return weights[name]


def load_weights(model: nn.Module, path: Path, *, own: str | None = None) -> None:
    """Puts a file's weights into a model, but for those whose names begin with `own`.

    Raises:
        UserError: when the file is missing, damaged, or of another model.
    """
    weights = read_weights(path)
    _load(model, weights if own is None else with_own(model, weights, own), path, assign=False)


def with_own(model: nn.Module, weights: Weights, prefix: str) -> Weights:
    """Returns weights with a model's own in the place of those whose names begin with `prefix`."""
    own = model.state_dict()
    return {name: own.get(name, one) if name.startswith(prefix) else one for name, one in weights.items()}


def adopt_weights(model: nn.Module, path: Path, *, mapped: bool) -> None:
    """Puts a file's weights in the place of a model's own, which need no memory.

    Args:
        model: the model, in host memory.
        path: the weights file.
        mapped: whether the weights stay in the file, mapped into memory: pages of it are read when they are looked
            up, and the system may take them back. The file must not be changed in place while the model lives; a
            rename over it is no change. What is written to the weights stays in memory and never reaches the file.

    Raises:
        UserError: when the file is missing, damaged, or of another model.
    """
    weights = _mapped(path) if mapped else _in_memory(path)
    _load(model, weights, path, assign=True)


def _load(model: nn.Module, weights: Weights, path: Path, *, assign: bool) -> None:
    try:
        model.load_state_dict(weights, strict=True, assign=assign)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: the weights are of another model: {reason}") from None


def _in_memory(path: Path) -> Weights:
    """Returns copies of a file's weights, which safetensors maps as it reads them."""
    return {name: tensor.clone() for name, tensor in read_weights(path).items()}


def _mapped(path: Path) -> Weights:
    """Returns a file's weights as views of its pages, of which only those in use take memory.

    safetensors maps files too, but the system then reads far more than the rows that are looked up, and keeps it.
    """
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            # pages that were read to check the file's hash would stay, and be mapped in blocks of megabytes
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        pages.madvise(mmap.MADV_RANDOM)
        found: Weights = {}
        for name, entry in header.items():
            if name == "__metadata__" or name.startswith(OPTIMIZER):
                continue
            shape, dtype, first = entry["shape"], _DTYPES[entry["dtype"]], entry["data_offsets"][0]
            count = math.prod(shape)
            found[name] = (
                torch.frombuffer(pages, dtype=dtype, count=count, offset=8 + header_bytes + first).view(shape)
                if count
                else torch.empty(shape, dtype=dtype)
            )
        return found
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(f"{path}: no readable weights ({error}).") from None
