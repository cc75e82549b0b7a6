"""A key index answers as a dictionary does, whatever was added and removed, and however keys crowd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dhen.inputs.growing import SMALLEST, KeyIndex

CROWDED = st.integers(1, 3).map(lambda low: low) | st.integers(1, 400)
"""Few homes: keys below 2^32 have their own low bits as theirs."""
KEYS = st.integers(-(2**63), 2**63 - 1).filter(lambda key: key not in (0, -1)) | CROWDED


def rows_of(index: KeyIndex, keys: list[int]) -> list[int]:
    return list(index.find(torch.tensor(keys, dtype=torch.int64)).tolist())


@given(st.lists(st.tuples(st.sets(KEYS, max_size=80), st.sets(KEYS, max_size=80)), max_size=8))
def test_it_answers_as_a_dictionary_does(history: list[tuple[set[int], set[int]]]) -> None:
    index, known, row = KeyIndex(), dict[int, int](), 0
    for added, removed in history:
        new = sorted(added - known.keys())
        index.add(torch.tensor(new, dtype=torch.int64), torch.arange(row + 1, row + 1 + len(new)))
        known |= dict(zip(new, range(row + 1, row + 1 + len(new)), strict=True))
        row += len(new)
        gone = sorted(removed & known.keys())
        index.remove(torch.tensor(gone, dtype=torch.int64))
        for key in gone:
            del known[key]
        asked = sorted(added | removed | known.keys())
        assert rows_of(index, asked) == [known.get(key, 0) for key in asked]


@pytest.mark.parametrize("step", [256, 2**32], ids="keys {} apart".format)
def test_keys_of_one_bucket_are_all_found_while_it_grows(step: int) -> None:
    index, keys = KeyIndex(), 1 + step * torch.arange(3 * SMALLEST)
    for part in torch.arange(3 * SMALLEST).split(100):
        index.add(keys[part], part + 1)
    assert torch.equal(index.find(keys), torch.arange(3 * SMALLEST) + 1)


def test_removed_keys_do_not_fill_it_up() -> None:
    index = KeyIndex()
    for start in range(1, 50 * SMALLEST, 64):
        keys = torch.arange(start, start + 64)
        index.add(keys, keys)
        index.remove(keys)
    assert len(index._rows) <= 2 * SMALLEST
