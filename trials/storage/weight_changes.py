"""What weights became since an earlier state: rows that differ in a bit, and whole tensors where most do.

A tensor of a model is in the changes whole, under its name, or as two: `NAME@rows` (int64, N rows along its first
dimension, in order) and `NAME@values` (their new values). A tensor of which nothing changed is not there. For the
keys that rows of growing tables belong to, `NAME@gone` holds those that have no row any more (tombstones), in
order.

Shapes: N rows that changed, R rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dhen.errors import UserError
from trials.storage.weights_file import Weights

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
        UserError: where the changes are of another model, or of another state of this one; then nothing was
            changed.
    """
    _check(weights, found)
    with torch.no_grad():
        for name, tensor in weights.items():
            if name in found:
                tensor.copy_(found[name])
            elif f"{name}{ROWS}" in found:
                rows, values = found[f"{name}{ROWS}"], found[f"{name}{VALUES}"]
                tensor[rows.to(tensor.device)] = values.to(tensor.device)


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


def _check(weights: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for key, tensor in found.items():
        name, _, part = key.partition("@")
        target = weights.get(name)
        if target is None or (not part and target.shape != tensor.shape):
            raise UserError(f"the increment changes {name}, which the bundle's model has not in this form.")
        if part == "rows":
            values = found.get(f"{name}{VALUES}")
            fits = values is not None and values.shape == (len(tensor), *target.shape[1:])
            if not fits or (len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < len(target)):
                raise UserError(f"the increment changes rows of {name} that the bundle's model has not.")
        if part == "gone" and not bool(torch.isin(tensor, target).all()):
            raise UserError(f"the increment takes rows from ids that have none in the bundle ({name}).")
