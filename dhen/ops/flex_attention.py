"""PyTorch's FlexAttention over a layout of blocks: fused and compiled, on accelerators alone.

On CPUs its forward runs, and a test compares it; its backward does not (torch 2.13). It has no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dhen.ops.block_layout import BlockLayout

LEAST_HEAD = 16
"""Numbers of a head that its kernel asks for at least."""


def flex_runs(device_type: str, head: int, p: float) -> bool:
    """Returns whether FlexAttention trains there, with heads of so many numbers and dropout `p`."""
    return device_type == "cuda" and head >= LEAST_HEAD and not p


def flex_values(q_BHMd: Tensor, k_BHMd: Tensor, v_BHMd: Tensor, layout: BlockLayout) -> Tensor:
    """Returns softmax(q k^T) v of (B, H, M, d), where the layout attends; q is scaled already."""
    attend = _attention(q_BHMd.device.type)
    return attend(q_BHMd, k_BHMd, v_BHMd, block_mask=_block_mask(layout, str(q_BHMd.device)), scale=1.0)


@cache
def _attention(device_type: str) -> Callable[..., Tensor]:
    """Compiled where its kernel is."""
    attend = cast("Callable[..., Tensor]", flex_attention)
    return torch.compile(attend) if device_type == "cuda" else attend


@lru_cache(maxsize=64)
def _block_mask(layout: BlockLayout, device: str) -> BlockMask:
    table, size = layout.table().to(device), layout.size

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch
        return table[head, query // size, key // size]

    m = layout.embeddings
    return create_block_mask(attends, None, len(layout.heads), m, m, device=device)
