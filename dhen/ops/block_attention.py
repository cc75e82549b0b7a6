"""Attention over a layout of blocks: each block of queries with the blocks of keys that it attends to, gathered.

Rows of a layout that attend to equally many blocks are computed together, so that nothing is padded to the
widest row (a global block's) and the products are exactly those of the layout. Only if the blocks do not
divide the embeddings the last block has padding: its keys get no weight, its queries are computed and left
out. Backward gathers again, so that what is kept is linear in the pairs of blocks that attend.

Shapes: B examples, M embeddings, D = H d their dimension, H heads of d numbers, V = 3 D numbers of queries,
keys and values; N blocks of s embeddings, R blocks of queries that are computed together, over all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dhen.cost import ATTENTION, SOFTMAX_FLOPS, CostRow, Costs, elementwise_cost
from dhen.ops.block_layout import BlockLayout
from dhen.ops.norm import keep_mask, where_kept
from dhen.tape import FP32_BYTES, MASK_BYTES, LinearBytes, Tape

# PyTorch's fused attention on accelerators: dense, and over a layout of blocks (FlexAttention, compiled).
#
# On CPUs FlexAttention's forward runs, and a test compares it; its backward does not (torch 2.13), and it has no
# dropout.

MOST_EXAMPLES = 65_535
"""Number of examples that a GPU's kernels take at once: they have them if a grid has so many places."""
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
    """Compiled if its kernel is."""
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


class QueryGroup(NamedTuple):
    """Blocks of queries that are computed together; blocks are counted over all heads, one after another."""

    width: int
    """Blocks that each attends to."""
    padded: int
    """Keys at the end of the last of them that are padding."""
    rows: list[int]
    columns: list[int]
    """The blocks that they attend to, one row after another."""


def gathered(blocks: list[int], layout: BlockLayout) -> list[int]:
    """Returns the blocks that are gathered; none if these are all there are, in their order, as a global block's
    are."""
    return [] if blocks == list(range(len(layout.heads) * layout.blocks)) else blocks


def together(layout: BlockLayout) -> list[QueryGroup]:
    """Returns the blocks of queries by how many blocks they attend to, and whether padding is among these."""
    groups: dict[tuple[int, int], QueryGroup] = {}
    last = layout.blocks - 1
    for head, rows in enumerate(layout.heads):
        first = head * layout.blocks
        for place, row in enumerate(rows):
            key = len(row), layout.padding if row[-1] == last else 0
            group = groups.setdefault(key, QueryGroup(*key, [], []))
            group.rows.append(first + place)
            group.columns.extend(first + column for column in row)
    return list(groups.values())


class BlockAttention(nn.Module):
    """Queries, keys and values of (B, M, V) -> (B, M, H d): softmax(q k^T) v where the layout attends."""

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout, self.groups = layout, together(layout)
        for place, group in enumerate(self.groups):
            for name, blocks in (("rows", group.rows), ("columns", group.columns)):
                taken = gathered(blocks, layout)
                buffer = torch.tensor(taken) if taken else None
                self.register_buffer(f"{name}{place}", buffer, persistent=False)

    def forward(self, qkv_BMV: Tensor, p: float) -> Tensor:
        """With dropout `p` of the weights; q is scaled already, and on CPUs v by dropout's scale."""
        batch, m, width = qkv_BMV.shape
        heads = len(self.layout.heads)
        fused = is_fused(qkv_BMV.device.type, self.layout, width // (3 * heads), p)
        if fused:
            q, k, v = qkv_BMV.view(batch, m, 3, heads, -1).permute(2, 0, 3, 1, 4)
            if self.layout.blocks > 1:
                values = flex_values(q, k, v, self.layout)
            else:
                values = fused_values(q, k, v, p, scale=1.0)
            return values.transpose(1, 2).reshape(batch, m, -1)
        indices = [
            getattr(self, f"{what}{place}")
            for place in range(len(self.groups))
            for what in ("rows", "columns")
        ]
        y_BMD: Tensor = _BlockAttention.apply(qkv_BMV, p, self.layout, self.groups, *indices)  # type: ignore[no-untyped-call]
        return y_BMD


def is_fused(device_type: str, layout: BlockLayout, head: int, p: float) -> bool:
    """Returns whether PyTorch has one kernel for it."""
    return device_type == "cuda" and (layout.blocks == 1 or flex_runs(device_type, head, p))


class _BlockAttention(torch.autograd.Function):
    """Keeps queries, keys and values by block, the weights, and dropout's mask."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BMV: Tensor,
        p: float,
        layout: BlockLayout,
        groups: list[QueryGroup],
        *indices: Tensor | None,
    ) -> Tensor:
        blocks = _split(qkv_BMV, 3, layout)
        values, saved = torch.empty_like(blocks[0]), []
        for group, places in zip(groups, _places(indices), strict=True):
            weights = _weights(blocks, group, places)
            dropout = _Dropout(p, _keep(weights, p) if p else None)
            places.put_queries(values, torch.bmm(dropout(weights), places.keys(blocks[2], weights.shape[0])))
            saved += [weights] if dropout.keep is None else [weights, dropout.keep]
        ctx.save_for_backward(blocks, *saved, *indices)
        ctx.p, ctx.layout, ctx.groups = p, layout, groups
        return _joined(values.unsqueeze(0), layout)

    @staticmethod
    def backward(ctx: Any, gradient_BMD: Tensor) -> tuple[Tensor | None, ...]:
        count, kept = len(ctx.groups), 2 if ctx.p else 1
        blocks, *saved = ctx.saved_tensors
        indices = saved[kept * count :]
        by_values, by_blocks = _split(gradient_BMD, 1, ctx.layout)[0], torch.empty_like(blocks)
        by_blocks[1:].zero_()
        for place, places in enumerate(_places(indices)):
            dropout = _Dropout(ctx.p, saved[kept * place + 1] if ctx.p else None)
            _add_gradients(by_blocks, by_values, blocks, saved[kept * place], places, dropout)
        return _joined(by_blocks, ctx.layout), *[None] * (3 + len(indices))


class _Places(NamedTuple):
    """Where the blocks of a group stand; None if these are all blocks in their order."""

    rows: Tensor | None
    columns: Tensor | None

    def queries(self, x: Tensor) -> Tensor:
        """(B R, s, d)."""
        return x.flatten(0, 1) if self.rows is None else x.index_select(1, self.rows).flatten(0, 1)

    def keys(self, x: Tensor, count: int) -> Tensor:
        """(count, width s, d): the blocks of each of B R rows, one after another."""
        taken = x if self.columns is None else x.index_select(1, self.columns)
        return taken.view(count, -1, x.shape[-1])

    def put_queries(self, into: Tensor, values: Tensor) -> None:
        """Each block of queries is in one group."""
        values = values.view(into.shape[0], -1, *into.shape[2:])
        if self.rows is None:
            into.copy_(values)
        else:
            into.index_copy_(1, self.rows, values)

    def add_keys(self, into: Tensor, values: Tensor) -> None:
        """A block of keys is as often in a group as queries attend to it."""
        values = values.view(into.shape[0], -1, *into.shape[2:])
        if self.columns is None:
            into.add_(values)
        else:
            into.index_add_(1, self.columns, values)


class _Dropout(NamedTuple):
    """Dropout of weights; on CPUs its scale is in v."""

    p: float
    keep: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x where it is kept."""
        if self.keep is None:
            return x
        return where_kept(self.keep, x) if x.device.type == "cpu" else x * self.keep / (1.0 - self.p)


def _places(indices: Sequence[Tensor | None]) -> list[_Places]:
    return [_Places(*pair) for pair in zip(indices[::2], indices[1::2], strict=True)]


def _keep(weights: Tensor, p: float) -> Tensor:
    """Dropout's mask."""
    if weights.device.type == "cpu":
        return keep_mask(weights, p)
    return torch.rand_like(weights, dtype=torch.float32) >= p


def _split(x_BMV: Tensor, parts: int, layout: BlockLayout) -> Tensor:
    """(parts, B, H N, s, d), one block after another, with zeros for padding."""
    batch, m, _ = x_BMV.shape
    heads, padded = len(layout.heads), layout.blocks * layout.size
    x = x_BMV.view(batch, m, parts, heads, -1).permute(2, 0, 3, 1, 4)
    shape = (parts, batch, heads, padded, x.shape[-1])
    split = x.new_zeros(shape) if padded > m else x.new_empty(shape)
    split[:, :, :, :m].copy_(x)
    return split.view(parts, batch, heads * layout.blocks, layout.size, -1)


def _joined(blocks: Tensor, layout: BlockLayout) -> Tensor:
    """(B, M, V) of (parts, B, H N, s, d): what `_split` takes apart."""
    parts, batch, _, _, d = blocks.shape
    heads, m = len(layout.heads), layout.embeddings
    x_BMV = blocks.new_empty(batch, m, parts * heads * d)
    by_head = blocks.view(parts, batch, heads, -1, d)[:, :, :, :m]
    x_BMV.view(batch, m, parts, heads, d).copy_(by_head.permute(1, 3, 0, 2, 4))
    return x_BMV


def _weights(blocks: Tensor, group: QueryGroup, places: _Places) -> Tensor:
    """softmax(q k^T); padding has no weight."""
    q = places.queries(blocks[0])
    scores = torch.bmm(q, places.keys(blocks[1], q.shape[0]).mT)
    del q
    if group.padded:
        scores[:, :, -group.padded :].fill_(float("-inf"))
    return scores.softmax(dim=-1)


def _add_gradients(
    into: Tensor, by_values: Tensor, blocks: Tensor, weights: Tensor, places: _Places, dropout: _Dropout
) -> None:
    """Adds the gradients of queries, keys and values from blocks that were computed together."""
    q, k, v = blocks
    gradient, count = places.queries(by_values), weights.shape[0]
    places.add_keys(into[2], torch.bmm(dropout(weights).mT, gradient))
    values = places.keys(v, count)
    by_scores = dropout(torch.bmm(gradient, values.mT))
    by_scores = torch._softmax_backward_data(by_scores, weights, -1, weights.dtype)  # before the softmax
    del values
    places.put_queries(into[0], torch.bmm(by_scores, places.keys(k, count)))
    places.add_keys(into[1], torch.bmm(by_scores.mT, places.queries(q)))


# What attention over a layout of blocks costs: its FLOPs, and its memory on a tape.

INDEX_BYTES = 8


def block_attention_cost(layout: BlockLayout, dim: int) -> Costs:
    """Returns the two products and the softmax of all pairs of blocks, padding included."""
    scores = layout.pairs * layout.size**2
    flops = 2.0 * scores * (dim // len(layout.heads))
    return (
        CostRow("scores", ATTENTION, flops),
        elementwise_cost("softmax", scores, flops_each=SOFTMAX_FLOPS),
        CostRow("values", ATTENTION, flops),
    )


def block_attention_tape(tape: Tape, qkv: int, layout: BlockLayout, dim: int, *, p: float) -> int:
    """Writes down `BlockAttention` of queries, keys and values; the tensor of its output."""
    m, heads = layout.embeddings, len(layout.heads)
    blocks = (blocks for group in together(layout) for blocks in (group.rows, group.columns))
    tape.buffer_bytes += INDEX_BYTES * sum(len(gathered(each, layout)) for each in blocks)
    if is_fused(tape.device, layout, dim // heads, p):
        return fused_attention_tape(tape, qkv, m, dim, heads)
    size, split, itemsize = layout.size, layout.blocks * layout.size * dim, tape.itemsize
    saved, groups, masks = [tape.scratch(3 * split)], together(layout), MASK_BYTES if p else 0
    all_scores = [size * size * len(group.columns) for group in groups]
    # beside what forward saves and puts out; blocks of later groups have not been made before
    most, not_yet = 0, (itemsize + masks) * sum(all_scores) + itemsize * m * dim
    most_backward = 0
    for group, scores in zip(groups, all_scores, strict=True):
        saved.append(tape.scratch(scores))
        if p:
            saved.append(tape.scratch(scores, itemsize=MASK_BYTES))
        head = size * dim // heads
        queries, keys = head * len(group.rows), head * len(group.columns)
        copied_queries = head * len(gathered(group.rows, layout))
        copied_keys = head * len(gathered(group.columns, layout))
        # bytes of the scores; their softmax; its dropout; the products with v
        forward = max(
            itemsize * (copied_queries + copied_keys + scores),
            itemsize * 2 * scores,
            (itemsize + 2 * masks) * scores,
            masks * scores + itemsize * (scores + (scores if p else 0) + copied_keys + queries),
        )
        most = max(most, forward - not_yet)
        not_yet -= (itemsize + masks) * scores
        # numbers of the gradients of v; of the scores; of q and k
        backward = max(
            (scores if p else 0) + keys,
            copied_keys + 2 * scores,
            scores + copied_keys + queries,
            scores + copied_queries + keys,
        )
        most_backward = max(most_backward, copied_queries + backward - 3 * m * dim)
    return tape.operation(
        m * dim,
        [qkv],
        saves=saved,
        running=LinearBytes(tape.rows * (itemsize * split + most)),
        # the gradient of queries, keys and values is made last
        backward_running=LinearBytes(tape.rows * itemsize * (4 * split + most_backward)),
    )


def fused_attention_tape(tape: Tape, qkv: int, embeddings: int, dim: int, heads: int) -> int:
    """Writes down attention in one kernel, which keeps its inputs, its output, and a number per row of scores."""
    values, sums = embeddings * dim, tape.scratch(heads * embeddings, itemsize=FP32_BYTES)
    attended = tape.operation(
        values, [qkv], saves=[qkv, sums], saves_output=True, backward_running=tape.held(3 * values)
    )
    return tape.copy(attended) if heads > 1 else attended
