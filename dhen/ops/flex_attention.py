"""PyTorch's fused attention on accelerators: dense, and over a layout of blocks (FlexAttention, compiled).

On CPUs FlexAttention's forward runs, and a test compares it; its backward does not (torch 2.13), and it has no
dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dhen.ops.block_layout import BlockLayout

MOST_EXAMPLES = 65_535
"""Number of examples that a GPU's kernels take at once: they have them where a grid has so many places."""
LEAST_HEAD = 16
"""Numbers of a head that its kernel asks for at least."""


def flex_runs(device_type: str, head: int, p: float) -> bool:
    """Returns whether FlexAttention trains there, with heads of so many numbers and dropout `p`."""
    return device_type == "cuda" and head >= LEAST_HEAD and not p


def flex_values(q_BHMd: Tensor, k_BHMd: Tensor, v_BHMd: Tensor, layout: BlockLayout) -> Tensor:
    """Returns softmax(q k^T) v of (B, H, M, d), where the layout attends; q is scaled already."""
    mask = _block_mask(layout, str(q_BHMd.device))
    attend = partial(_attention(q_BHMd.device.type), block_mask=mask, scale=1.0)
    return _in_parts(attend, q_BHMd, k_BHMd, v_BHMd)


def fused_values(
    q_BHMd: Tensor, k_BHMd: Tensor, v_BHMd: Tensor, p: float, scale: float | None = None
) -> Tensor:
    """Returns dropout(softmax(q k^T scale)) v of (B, H, M, d); without a scale it is 1 / sqrt(d)."""
    return _in_parts(
        partial(F.scaled_dot_product_attention, dropout_p=p, scale=scale), q_BHMd, k_BHMd, v_BHMd
    )


def _in_parts(attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    """Attends to as many examples at a time as a kernel takes."""
    if len(qkv[0]) <= MOST_EXAMPLES:
        return attend(*qkv)
    parts = zip(*(torch.split(each, MOST_EXAMPLES) for each in qkv), strict=True)
    return torch.cat([attend(*part) for part in parts])


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
