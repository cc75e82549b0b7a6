"""The inputs of a model for B examples, as tensors.

Shapes: B examples, T categorical tables, G growing ones among them, K numeric inputs, N numbers with buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Keys(NamedTuple):
    """Ids of growing tables before they have rows: 64-bit hashes of the log's values, int64, in host memory.

    0 is a missing value.
    """

    columns_BG: Tensor
    """One key for each growing categorical table, in the order of the schema."""
    bags: tuple[Tensor, ...]
    """All keys of each growing multi-hot table, one after another; its offsets are those of the batch's bag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBatch:
    """Model inputs, in the order of a `FeatureSchema` (T categorical tables, K numeric inputs).

    Ids are local to their table. A multi-hot column is a pair (ids of all examples one after another,
    offsets of length B at which each example's ids start), as `torch.nn.functional.embedding_bag` takes it.
    """

    ids_BT: Tensor
    """int32 or int64, one id for each categorical table; 0 for a growing one while there are `keys`."""
    bags: tuple[tuple[Tensor, Tensor], ...]
    """One (ids, offsets_B) for each multi-hot table; ids are 0 for a growing one while there are `keys`."""
    numeric_BK: Tensor
    """float32, transformed; missing values are zero and have an indicator input of their own."""
    share_BN: Tensor | None = None
    """float32: of each number with buckets, how far it is from the even towards the odd one of its two nodes
    (`dhen.inputs.lift`); None if the log has no buckets."""
    keys: Keys | None = None
    """Ids of growing tables, whose rows `dhen.inputs.growing` finds; None if there are none, or none any
    more."""

    @property
    def size(self) -> int:
        """B."""
        return int(self.numeric_BK.shape[0])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> FeatureBatch:
        """The same inputs on a device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> FeatureBatch:
        """The same inputs in page-locked memory, from where copies to an accelerator need not wait."""
        return self.each(lambda tensor: tensor.pin_memory())

    def each(self, function: Callable[[Tensor], Tensor]) -> FeatureBatch:
        """The same inputs, each tensor put through a function; keys stay in host memory, where rows are found."""
        return FeatureBatch(
            ids_BT=function(self.ids_BT),
            bags=tuple((function(ids), function(offsets)) for ids, offsets in self.bags),
            numeric_BK=function(self.numeric_BK),
            share_BN=None if self.share_BN is None else function(self.share_BN),
            keys=self.keys,
        )
