from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trials.data.rows import Bags

bag_lists = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12)


def bags_of(lists: list[list[int]]) -> Bags:
    offsets = np.concatenate(([0], np.cumsum([len(bag) for bag in lists]))).astype(np.int64)
    return Bags(ids=np.array([i for bag in lists for i in bag], dtype=np.int32), offsets=offsets)


def lists_of(bags: Bags) -> list[list[int]]:
    return [part.tolist() for part in np.split(bags.ids, bags.offsets[1:-1])] if len(bags.offsets) > 1 else []


@given(bag_lists, st.data())
def test_taking_and_slicing_bags(lists: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1)))
    taken = bags_of(lists).take(np.array(rows, dtype=np.int64))
    assert lists_of(taken) == [lists[row] for row in rows]
    first = data.draw(st.integers(0, len(lists)))
    last = data.draw(st.integers(first, len(lists)))
    assert lists_of(bags_of(lists).slice(first, last)) == lists[first:last]
