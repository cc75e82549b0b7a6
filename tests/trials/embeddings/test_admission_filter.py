"""The admission filter never counts too little between two halvings, and seldom too much."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from trials.training.embeddings.growing import COUNTERS_PER_ROW, MOST, AdmissionFilter

KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(1, 20)


@given(st.lists(st.lists(KEYS, min_size=1, max_size=20), max_size=6))
def test_no_count_is_too_low(batches: list[list[int]]) -> None:
    counting, seen = AdmissionFilter(100), Counter[int]()
    for batch in batches:
        times = Counter(batch)
        seen.update(times)
        counts = counting.count(torch.tensor(list(times)), torch.tensor(list(times.values())))
        assert all(count >= seen[key] for key, count in zip(times, counts.tolist(), strict=True))


def test_few_counts_are_too_high() -> None:
    """As many keys as are counted before it is crowded, once each, then keys that never were."""
    rows = 5_000
    counting, drawn = AdmissionFilter(rows), torch.Generator().manual_seed(0)
    width = counting.counts.shape[1]
    assert width >= COUNTERS_PER_ROW * rows
    keys = torch.randint(-(2**62), 2**62, (width // 4,), generator=drawn)
    once = torch.ones_like(keys)
    for part, times in zip(keys.split(500), once.split(500), strict=True):
        assert not counting.crowded
        counting.count(part, times)
    others = torch.randint(-(2**62), 2**62, (500,), generator=drawn)
    too_high = (counting.count(others, once[:500]) > 1).float().mean()
    assert 0.0 < too_high < 0.08  # (1 - e^(-1/4))^2 is 4.9 %


def test_counts_end_at_their_most_and_are_halved() -> None:
    counting = AdmissionFilter(1000)
    key, many = torch.tensor([7]), torch.tensor([10_000])
    assert counting.count(key, many).item() == MOST
    counting.halve()
    assert counting.count(key, torch.tensor([1])).item() == MOST // 2 + 1
    counting.clear()
    assert counting.count(key, torch.tensor([1])).item() == 1


def test_it_is_crowded_until_rare_keys_are_forgotten() -> None:
    counting = AdmissionFilter(1000)
    keys = torch.randint(-(2**62), 2**62, (counting.counts.shape[1] // 3,))
    counting.count(keys, torch.ones_like(keys))
    assert counting.crowded
    counting.halve()
    assert not counting.crowded
    assert (counting.count(keys[:100], torch.ones(100, dtype=torch.int64)) == 1).all()
