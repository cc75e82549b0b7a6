from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data import loader
from trials.data.loader import row_batches, sequential, shuffled


@given(
    st.integers(0, 300),
    st.integers(1, 40),
    st.integers(0, 9),
    st.booleans(),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_every_row_comes_once(
    rows: int, batch: int, start: int, windows: bool, block: int, blocks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "BLOCK_ROWS", block)
        patch.setattr(loader, "WINDOW_BLOCKS", blocks)
        whole = list(row_batches(shuffled(rows, seed=1, epoch=2, by_windows=windows), batch, 0))
        late = list(row_batches(shuffled(rows, seed=1, epoch=2, by_windows=windows), batch, start))
        in_order = list(row_batches(sequential(rows), batch, 0))
    assert sorted(np.concatenate([[], *whole])) == list(range(rows))
    assert np.concatenate([[], *in_order]).tolist() == list(range(rows))
    assert all(len(part) == batch for part in whole[:-1])
    assert [part.tolist() for part in late] == [part.tolist() for part in whole[start:]]


@pytest.mark.parametrize("windows", [False, True])
def test_orders_differ_by_seed_and_epoch_alone(windows: bool) -> None:
    def order_of(seed: int, epoch: int) -> list[int]:
        return np.concatenate(list(shuffled(5000, seed=seed, epoch=epoch, by_windows=windows))).tolist()

    assert order_of(0, 0) == order_of(0, 0)
    assert order_of(0, 0) != order_of(0, 1) != order_of(1, 0) != order_of(0, 0)


def test_windows_mix_rows_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BLOCK_ROWS", 16)
    monkeypatch.setattr(loader, "WINDOW_BLOCKS", 64)
    first = next(shuffled(100_000, seed=0, epoch=0, by_windows=True))
    assert len(first) == 1024
    assert len(np.unique(first // 10_000)) == 10  # blocks from all parts of the split
    assert np.mean(np.abs(np.diff(first)) > 16) > 0.9  # neighbours do not stay together
