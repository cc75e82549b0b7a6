"""The order in which training visits rows: a function of seed and epoch, the same on every machine.

A split up to `GLOBAL_SHUFFLE_BYTES` is permuted as a whole. A larger one would be read at random from disk:
there runs of consecutive rows are permuted, and then the rows of each window of runs, which is nearly as
random and reads a run at a time. The rule looks at the rows of a pass alone, not at the memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

GLOBAL_SHUFFLE_BYTES = 16 << 30
"""Size of a split's arrays up to which its rows are permuted as a whole."""
BLOCK_ROWS = 1 << 10
"""Number of consecutive rows in a run, which a huge split keeps together up to their window."""
WINDOW_BLOCKS = 1 << 12
"""Number of runs whose rows are permuted together."""

Rows = NDArray[np.int64]


def row_batches(windows: Iterator[Rows], batch_size: int, start_batch: int) -> Iterator[Rows]:
    """Cuts an order into batches of row numbers, the last one perhaps smaller; leaves out the first ones."""
    skip, waiting = start_batch * batch_size, np.empty(0, dtype=np.int64)
    for window in windows:
        dropped = min(skip, len(window))
        skip -= dropped
        waiting = np.concatenate([waiting, window[dropped:]])
        full_rows = len(waiting) // batch_size * batch_size
        for start in range(0, full_rows, batch_size):
            yield waiting[start : start + batch_size]
        waiting = waiting[full_rows:]
    if len(waiting):
        yield waiting


def shuffled(rows: int, *, seed: int, epoch: int, by_windows: bool) -> Iterator[Rows]:
    """Yields each row number once, in a random order, a window at a time."""
    rng = np.random.default_rng((seed, epoch))
    if not by_windows:
        yield rng.permutation(rows)
        return
    runs = rng.permutation(-(-rows // BLOCK_ROWS))
    for start in range(0, len(runs), WINDOW_BLOCKS):
        starts = runs[start : start + WINDOW_BLOCKS] * BLOCK_ROWS
        window = (starts[:, None] + np.arange(BLOCK_ROWS)).ravel()
        yield rng.permutation(window[window < rows])


def sequential(rows: int) -> Iterator[Rows]:
    """Yields each row number once, in order, a window at a time."""
    step = BLOCK_ROWS * WINDOW_BLOCKS
    for start in range(0, rows, step):
        yield np.arange(start, min(start + step, rows))
