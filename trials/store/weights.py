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

import numpy as np
import torch
from numpy.typing import NDArray
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
"""Beginning of the names of optimizer state (`trials.training.checkpointer`)."""


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
    """Reads the optimizer state that is beside a file's weights; empty if there is none.

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
        UserError: if the file has none.
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
    weights = _mapped(path) if mapped else read_weights(path)
    if not mapped:  # safetensors maps a file's weights as it reads them
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    _load(model, weights, path, assign=True)


def _load(model: nn.Module, weights: Weights, path: Path, *, assign: bool) -> None:
    try:
        model.load_state_dict(weights, strict=True, assign=assign)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: the weights are of another model: {reason}") from None


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


# What weights became since an earlier state: rows that differ in a bit, and whole tensors if most do.
#
# A tensor of a model is in the changes whole, under its name, or as two: `NAME@rows` (int64, N rows along its
# first dimension, in order) and `NAME@values` (their new values). A tensor of which nothing changed is not
# there. For the keys that rows of growing tables belong to, `NAME@gone` holds those that have no row any more
# (tombstones), in order.
#
# Shapes: N rows that changed, R rows of a tensor.

KEYS = "features.growing.keys"
"""Name of the tensor of the keys that rows of growing tables belong to; the first entry stands for no row."""
ROWS, VALUES, GONE = "@rows", "@values", "@gone"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Weights:
    """Returns what makes `new` of `old`, two states of one model, as copies."""
    found: Weights = {}
    for name, tensor in new.items():
        row_N = _changed(old[name], tensor)
        if not len(row_N):
            continue
        if _rows_are_less(tensor, row_N):
            found[f"{name}{ROWS}"], found[f"{name}{VALUES}"] = row_N, tensor[row_N].clone()
        else:
            found[name] = tensor.clone()
    if KEYS in new and len(gone := without_rows(old[KEYS], new[KEYS])):
        found[f"{KEYS}{GONE}"] = gone
    return found


def row_changes(name: str, old: Tensor, row_N: Tensor, new: Tensor) -> Weights:
    """Returns what makes of a tensor what it became, of which only these rows, in order, may have changed.

    Args:
        name: the tensor's name.
        old: all rows as they were.
        row_N: the rows that may have changed, each once.
        new: these rows as they are.
    """
    differ = _changed(old[row_N], new)
    row_N, new = row_N[differ], new[differ]
    if not len(row_N):
        return {}
    if _rows_are_less(old, row_N):
        return {f"{name}{ROWS}": row_N, f"{name}{VALUES}": new}
    whole = old.clone()
    whole[row_N] = new
    return {name: whole}


def apply_changes(weights: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Makes of weights, in place, what they became.

    Raises:
        UserError: if the changes are of another model, or of another state of this one; then nothing was
            changed.
    """
    for key, changed in found.items():
        name, _, part = key.partition("@")
        target = weights.get(name)
        if target is None or (not part and target.shape != changed.shape):
            raise UserError(f"the increment changes {name}, which the bundle's model has not in this form.")
        if part == "rows":
            values = found.get(f"{name}{VALUES}")
            fits = values is not None and values.shape == (len(changed), *target.shape[1:])
            if not fits or (len(changed) and not 0 <= int(changed.min()) <= int(changed.max()) < len(target)):
                raise UserError(f"the increment changes rows of {name} that the bundle's model has not.")
        if part == "gone" and not bool(torch.isin(changed, target).all()):
            raise UserError(f"the increment takes rows from ids that have none in the bundle ({name}).")
    with torch.no_grad():
        for name, tensor in weights.items():
            if name in found:
                tensor.copy_(found[name])
            elif f"{name}{ROWS}" in found:
                rows = found[f"{name}{ROWS}"].to(tensor.device)
                tensor[rows] = found[f"{name}{VALUES}"].to(tensor.device)


def without_rows(old_R: Tensor, new_R: Tensor) -> Tensor:
    """Returns the keys (N) that have a row of growing tables in the old state and none in the new one."""
    had = old_R[old_R != 0]
    return had[~torch.isin(had, new_R)].sort().values


def _rows_are_less(tensor: Tensor, row_N: Tensor) -> bool:
    """Tells whether rows of a tensor, with their numbers, have fewer bytes than the whole tensor."""
    row_bytes = tensor[0].numel() * tensor.element_size() if tensor.dim() else 0
    return len(row_N) * (row_bytes + row_N.element_size()) < tensor.numel() * tensor.element_size()


def _changed(old: Tensor, new: Tensor) -> Tensor:
    """Returns the rows (N) that differ in a bit; a scalar is one row."""
    bits, rows = _BITS[new.element_size()], len(new) if new.dim() else 1
    if not new.numel():
        return torch.empty(0, dtype=torch.int64)
    differ = old.contiguous().view(bits) != new.contiguous().view(bits)
    return differ.view(rows, -1).any(dim=1).nonzero().squeeze(1)


# Logits of a split on disk: an array of NumPy, whole or not there, with a digest behind it that is checked when
# they are read.

REMEDY = "Restore the file from a copy, or delete it: the study's next command scores the split again."


def write_logits(logit_N: NDArray[np.float32], path: Path) -> None:
    """Writes logits; `numpy.load` reads the file too."""
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, logit_N)
        file.write(_logits_digest(logit_N))


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
    if noted not in (b"", _logits_digest(logit_N)):  # none of those that an earlier version wrote
        raise UserError(f"{path} is damaged: its predictions are not those that were written. {REMEDY}")
    return logit_N


def _logits_digest(logit_N: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(logit_N).data).digest()
