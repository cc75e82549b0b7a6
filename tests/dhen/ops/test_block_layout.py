"""Layouts are what they are written to be."""

from __future__ import annotations

import random

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from dhen.ops.block_layout import Blocks, cut, fixed, given, layout_of, sliding_window, variable, with_random


def drawn(rows: Blocks) -> list[str]:
    """A text of 0 and 1 per row, as users write them."""
    return ["".join(str(int(j in row)) for j in range(len(rows))) for row in rows]


def test_fixed_groups_see_themselves_and_the_last_block_of_each_group() -> None:
    rows = fixed(7, local_blocks=(3,), summaries=1)
    assert drawn(rows) == ["1110011"] * 3 + ["0011111"] * 3 + ["0010011"]


def test_fixed_groups_may_have_several_summaries_or_none() -> None:
    assert drawn(fixed(6, local_blocks=(3,), summaries=2)) == ["111011"] * 3 + ["011111"] * 3
    assert drawn(fixed(4, local_blocks=(2,), summaries=0)) == ["1100"] * 2 + ["0011"] * 2
    assert drawn(fixed(3, local_blocks=(2,), summaries=5)) == ["111"] * 3


def test_heads_may_take_turns_in_the_summaries_of_fixed_groups() -> None:
    firsts = [drawn(fixed(8, local_blocks=(4,), summaries=1, turn=turn))[0] for turn in range(5)]
    assert firsts == ["11110001", "11110010", "11110100", "11111000", "11110001"]


def test_a_sliding_window_has_neighbours_and_global_blocks() -> None:
    expected = ["111111", "111000", "111100", "101110", "100111", "100011"]
    assert drawn(sliding_window(6, window=1, global_blocks=1)) == expected
    assert drawn(sliding_window(4, window=0, global_blocks=0)) == ["1000", "0100", "0010", "0001"]


def test_variable_groups_and_global_blocks_stand_where_they_are_said_to() -> None:
    rows = variable(6, local_blocks=(1, 2), positions=(4, 9))
    assert drawn(rows) == ["100010", "011010", "011010", "000110", "111111", "000011"]


def test_random_blocks_are_others_and_as_many_as_there_are() -> None:
    window = sliding_window(12, window=1, global_blocks=1)
    rows = with_random(window, 3, random.Random("0 0"))
    assert [len(row - before) for row, before in zip(rows, window, strict=True)] == [0] + [3] * 11
    assert all(before <= row for row, before in zip(rows, window, strict=True))
    assert rows == with_random(window, 3, random.Random("0 0"))
    assert rows != with_random(window, 3, random.Random("1 0"))
    assert drawn(with_random(window, 99, random.Random(0))) == ["1" * 12] * 12


def test_random_blocks_are_those_of_every_version_of_python() -> None:
    """A job's fingerprint covers the seed alone."""
    rows = with_random(sliding_window(6, window=0, global_blocks=0), 1, random.Random("0 0"))
    assert drawn(rows) == ["100010", "010001", "001001", "100100", "100010", "010001"]


def test_a_given_layout_is_taken_as_it_is_or_joined_for_fewer_blocks() -> None:
    texts = ["1100", "0100", "0011", "1001"]
    assert drawn(given(4, texts)) == texts
    assert drawn(given(2, texts)) == ["10", "11"]


@hypothesis_given(st.integers(1, 3000), st.integers(1, 300))
def test_blocks_cover_all_embeddings_as_evenly_as_they_can(embeddings: int, most: int) -> None:
    count, size = cut(embeddings, most)
    assert size <= most
    assert (count - 1) * size < embeddings <= count * size
    assert count == -(-embeddings // most)


@pytest.mark.parametrize("embeddings", [12, 10])
def test_the_mask_is_the_layout_for_each_embedding(embeddings: int) -> None:
    rows = sliding_window(4, window=1, global_blocks=0)
    layout = layout_of(embeddings, 3, [rows, fixed(4, local_blocks=(2,), summaries=0)])
    mask = layout.mask()
    assert mask.shape == (2, embeddings, embeddings)
    for head, blocks in enumerate(layout.heads):
        for i in range(embeddings):
            assert mask[head, i].tolist() == [j // 3 in blocks[i // 3] for j in range(embeddings)]
    assert layout.pairs == 10 + 8
    assert layout.padding == 12 - embeddings


def test_where_all_attend_to_all_there_is_one_block() -> None:
    layout = layout_of(10, 5, [fixed(2, local_blocks=(4,), summaries=1)] * 2)
    assert layout == (10, 10, (((0,),),) * 2)
