"""The inputs of a model for B examples, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBatch:
    """Model inputs, in the order of a `FeatureSchema` (T categorical tables, K numeric inputs).

    Ids are local to their table. A multi-hot column is a pair (ids of all examples one after another,
    offsets of length B at which each example's ids start), as `torch.nn.functional.embedding_bag` takes it.
    """

    ids_BT: Tensor
    """int32 or int64, one id for each categorical table."""
    bags: tuple[tuple[Tensor, Tensor], ...]
    """One (ids, offsets_B) for each multi-hot table."""
    numeric_BK: Tensor
    """float32, transformed; missing values are zero and have an indicator input of their own."""

    @property
    def size(self) -> int:
        """B."""
        return int(self.numeric_BK.shape[0])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> FeatureBatch:
        """The same inputs on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> FeatureBatch:
        """The same inputs in page-locked memory, from where copies to an accelerator need not wait."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Callable[[Tensor], Tensor]) -> FeatureBatch:
        return FeatureBatch(
            ids_BT=function(self.ids_BT),
            bags=tuple((function(ids), function(offsets)) for ids, offsets in self.bags),
            numeric_BK=function(self.numeric_BK),
        )
