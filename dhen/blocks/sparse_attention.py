"""Sparse attention: the Transformer encoder layer of `attention`, whose embeddings attend in blocks.

u = W Encoder(x) as in the DHEN paper (section 3.2.2); each block of neighbouring embeddings attends to some blocks
alone. Layouts:

- `fixed`: local groups, and the last blocks of each, to which all attend (Sparse Transformers, arXiv 1904.10509);
- `sliding_window`: neighbours and global blocks (Longformer, arXiv 2004.05150);
- `bigbird`: these and random blocks (BigBird, arXiv 2007.14062);
- `variable`: groups of several sizes, global blocks anywhere, random blocks (DeepSpeed's sparse attention);
- `given`: whatever is written.

The pairs of blocks, and with them time and memory, grow linearly with the embeddings under `sliding_window`,
`bigbird`, and `variable` with sizes that are given; by the power 1.5 under `fixed` with groups of the square
root of the blocks, as that paper has them; and as they are written under `given`. If the layout lets all
attend to all, as it does over few embeddings, the module is `attention`, in its cost too.

Shapes: B examples, M embeddings, D their dimension, L embeddings out.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dhen.blocks.attention import EncoderConfig, heads_split
from dhen.blocks.base import BlockShape
from dhen.cost import Costs, headline_flops
from dhen.ops.block_attention import block_attention_cost, block_attention_tape
from dhen.ops.block_layout import (
    BlockLayout,
    Blocks,
    cut,
    fixed,
    given,
    layout_of,
    sliding_window,
    variable,
    with_random,
)
from dhen.tape import Tape

MOST = 65_536
Count = Annotated[int, Field(ge=0, le=MOST)]
USES = {
    "fixed": {"block_size", "local_blocks", "global_blocks", "per_head"},
    "sliding_window": {"block_size", "window", "global_blocks"},
    "bigbird": {"block_size", "window", "global_blocks", "random_blocks", "seed", "per_head"},
    "variable": {"block_size", "local_blocks", "global_positions", "random_blocks", "seed", "per_head"},
    "given": {"given"},
}
"""Settings of each layout; the others have no meaning with it."""
OF_LAYOUTS = set[str]().union(*USES.values())


class SparseAttentionConfig(EncoderConfig):
    """An encoder layer with attention in blocks, and its projection.

    Settings that the layout does not use have their defaults, whatever is said.
    """

    kind: Literal["sparse_attention"] = "sparse_attention"
    layout: Literal["fixed", "sliding_window", "bigbird", "variable", "given"] = "bigbird"
    """Which blocks attend to which: fixed (local groups and the summaries of all), sliding_window (neighbours and
    global blocks), bigbird (these and random blocks), variable (groups of several sizes, global blocks anywhere,
    random blocks), or given."""
    block_size: int = Field(default=8, gt=0, le=MOST)
    """Embeddings of a block at most; blocks are as even as they can be. Of all layouts but given."""
    window: Count = 1
    """Blocks on each side of its own that a block attends to. Of sliding_window and bigbird."""
    local_blocks: tuple[Annotated[int, Field(gt=0, le=MOST)], ...] = ()
    """Blocks of each local group from the first on; the last number stands for all that follow. None: the square
    root of their number, as in Sparse Transformers. Of fixed and variable."""
    global_blocks: Count = 1
    """Of sliding_window and bigbird the first blocks, which attend to all and to which all attend; of fixed the
    last blocks of each group, to which all attend."""
    global_positions: tuple[Count, ...] = (0,)
    """Places of the global blocks, the first being 0; places behind the last block mean none. Of variable."""
    random_blocks: Count = 1
    """Random blocks that a block attends to beside the others. Of bigbird and variable."""
    seed: Count = 0
    """Seed of the random blocks, which are the same for all examples and in every training. Of bigbird and
    variable."""
    per_head: bool = False
    """Whether each head has other random blocks, or, of fixed, other summaries. Of fixed, bigbird and variable."""
    given: tuple[str, ...] = ()
    """The layout itself, of given: a text for each of N blocks, such as ["110", "110", "011"], with a 1 for each
    block that it attends to. The embeddings are cut into N blocks, however many there are."""

    @model_validator(mode="before")
    @classmethod
    def _unused_settings_have_no_value(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unused = _unused({name: field.default for name, field in cls.model_fields.items()} | data)
        return {key: value for key, value in data.items() if key not in unused}

    @field_validator("given", mode="before")
    @classmethod
    def _texts(cls, rows: Any) -> Any:
        if not isinstance(rows, (list, tuple)) or any(not isinstance(row, str) for row in rows):
            raise ValueError('a layout is a list of texts in quotes, such as ["110", "110", "011"]')
        return rows

    @field_validator("given")
    @classmethod
    def _square(cls, rows: tuple[str, ...]) -> tuple[str, ...]:
        for place, row in enumerate(rows):
            if len(row) != len(rows) or set(row) - {"0", "1"}:
                raise ValueError(
                    f"row {place} is {row!r}; {len(rows)} rows need {len(rows)} characters each, 0 or 1"
                )
            if "1" not in row:
                raise ValueError(f"row {place} attends to nothing; a 1 in it would work")
        return rows

    @model_validator(mode="after")
    def _given_where_it_is_used(self) -> Self:
        if self.layout == "given" and not self.given:
            raise ValueError('layout given needs its rows: given: ["110", "110", "011"], say')
        return self

    def uses(self, setting: str) -> bool:
        """Whether the layout, with its other settings, has a use for it."""
        return setting not in _unused(dict(self))

    def layout_over(self, embeddings: int) -> BlockLayout:
        """Returns the layout over so many embeddings."""
        return _layout(self, embeddings)

    def products(self, shape: BlockShape) -> Costs:
        """The products of the blocks that attend, and their softmax."""
        return block_attention_cost(self.layout_over(shape.embeddings), shape.dim)

    def attend(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Attention in blocks."""
        qkv, layout = self.scaled_qkv(tape, x, shape), self.layout_over(shape.embeddings)
        if heads_split(self.heads, tape.ranks):  # the first rank's heads: others may attend to fewer blocks
            tape.compute_elsewhere(headline_flops(self.products(shape)))
            layout = layout.part(0, tape.ranks)
        return block_attention_tape(tape, qkv, layout, self.part_of(shape.dim, tape.ranks), p=dropout)


def _unused(settings: dict[str, Any]) -> set[str]:
    """Settings without a meaning beside the values of the others."""
    unused = OF_LAYOUTS - USES.get(str(settings["layout"]), OF_LAYOUTS)
    if not settings["random_blocks"] or "random_blocks" in unused:
        unused.add("seed")
        if settings["layout"] != "fixed":
            unused.add("per_head")
    if settings["heads"] == 1:
        unused.add("per_head")
    return unused


@lru_cache(maxsize=4096)
def _layout(config: SparseAttentionConfig, embeddings: int) -> BlockLayout:
    most = -(-embeddings // len(config.given)) if config.layout == "given" else config.block_size
    count, size = cut(embeddings, most)
    heads = range(config.heads) if config.per_head else [0] * config.heads
    return layout_of(embeddings, size, [_blocks(config, count, head) for head in heads])


def _blocks(config: SparseAttentionConfig, count: int, head: int) -> Blocks:
    """The layout of one head over so many blocks."""
    if config.layout == "given":
        return given(count, config.given)
    local = config.local_blocks or (round(count**0.5),)
    if config.layout == "fixed":
        return fixed(count, local_blocks=local, summaries=config.global_blocks, turn=head)
    if config.layout == "variable":
        rows = variable(count, local_blocks=local, positions=config.global_positions)
    else:
        rows = sliding_window(count, window=config.window, global_blocks=config.global_blocks)
    drawn = config.random_blocks if config.uses("random_blocks") else 0
    return with_random(rows, drawn, random.Random(f"{config.seed} {head}"))
