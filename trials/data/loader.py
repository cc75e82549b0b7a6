"""Batches of tensors from a prepared split. This is the only file of the folder that imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dhen.batch import FeatureBatch, Keys
from trials.data.encoding import EncodedRows
from trials.data.prepared_log import IdCounts, Split
from trials.data.raw.columns import MISSING_STAMP
from trials.data.raw.readers import ahead
from trials.records.strategy import rank_slice

# The order in which training visits rows: a function of seed and epoch, the same on every machine.
#
# A split up to `GLOBAL_SHUFFLE_BYTES` is permuted as a whole. A larger one would be read at random from disk:
# there runs of consecutive rows are permuted, and then the rows of each window of runs, which is nearly as
# random and reads a run at a time. The rule looks at the rows of a pass alone, not at the memory there is.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledBatch:
    """B examples with their labels."""

    features: FeatureBatch
    label_B: Tensor
    """Labels in float32, 0 or 1."""
    weight_B: Tensor | None
    """The log's weight column in float32; None if the log has none."""
    inverse_count_BT: Tensor | None = None
    """1 / the number of training rows that have the id, for each categorical and then each multi-hot table
    (`trials.data.prepared_log`), in float32; None if nobody asked for it."""
    time: int | None = None
    """Newest time stamp of the global batch, milliseconds since 1970, the same on all ranks; None if nobody
    asked for it, or no row of it has one."""
    of_step: int | None = None
    """Number of examples of the step over all ranks, if it may differ from step to step; None: the training's
    batch size."""

    @property
    def size(self) -> int:
        """Number of examples, B."""
        return len(self.label_B)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> LabelledBatch:
        """Returns the same batch on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> LabelledBatch:
        """Returns the same batch in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Callable[[Tensor], Tensor]) -> LabelledBatch:
        weight_B, inverse_BT = self.weight_B, self.inverse_count_BT
        return replace(
            self,
            features=self.features.each(function),
            label_B=function(self.label_B),
            weight_B=None if weight_B is None else function(weight_B),
            inverse_count_BT=None if inverse_BT is None else function(inverse_BT),
        )


def feature_batch(rows: EncodedRows) -> FeatureBatch:
    """Returns encoded rows as tensors; arrays that can be written to are shared, others copied."""
    bags = [(_tensor(bags.ids), _tensor(bags.offsets[:-1])) for bags in rows.bags]
    keys = tuple(ids for ids, _ in bags if ids.dtype is torch.int64)
    columns_BG = torch.empty(rows.rows, 0, dtype=torch.int64) if rows.keys is None else _tensor(rows.keys)
    return FeatureBatch(
        ids_BT=_tensor(rows.categorical),
        bags=tuple(
            (torch.zeros_like(ids, dtype=torch.int32) if ids.dtype is torch.int64 else ids, offsets)
            for ids, offsets in bags
        ),
        numeric_BK=_tensor(rows.numeric),
        share_BN=None if rows.share is None else _tensor(rows.share),
        keys=Keys(columns_BG, keys) if keys or rows.keys is not None else None,
    )


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())


def train_batches(
    split: Split,
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    last_rows: int | None = None,
    shuffle: bool = True,
    start_batch: int = 0,
    rank: int = 0,
    ranks: int = 1,
    counts: IdCounts | None = None,
    timed: bool = False,
) -> Iterator[LabelledBatch]:
    """Yields batches of one pass over a split; each row at most once.

    The order follows from (seed, epoch) alone. A last batch smaller than the others is dropped, unless it is
    the only one.

    Args:
        split: the rows to train on.
        batch_size: examples of the global batch.
        seed: seed of the order.
        epoch: number of the pass, 0, 1, 2 ...: every pass has an order of its own.
        last_rows: number of rows at the end of the split that a pass has; None: all rows.
        shuffle: False keeps the order of the log.
        start_batch: number of batches to leave out at the start, to go on where a training was interrupted.
        rank: which part of each global batch to yield.
        ranks: number of parts (equal up to one row, `rank_slice`) that a global batch is divided into.
        counts: how often ids occur, if batches are to say so.
        timed: whether batches are to say their newest time stamp, which the split must have.
    """
    used = split.rows if last_rows is None else last_rows
    order = _order(split, used, seed=seed, epoch=epoch, shuffle=shuffle)
    batches = max(1, used // batch_size) - start_batch
    for rows in islice(row_batches(order, batch_size, start_batch), max(0, batches)):
        yield _part(split, split.rows - used + rows, rank, ranks, counts, timed=timed)


@dataclass
class NumberedBatches:
    """The global batches of all passes over a split, by number: those of `train_batches`, whole, of which some
    may be left out; the fields are arguments of `train_batches`."""

    split: Split
    batch_size: int
    seed: int
    last_rows: int
    shuffle: bool = True
    counts: IdCounts | None = None
    timed: bool = False
    _epoch: int = field(default=-1, init=False)
    _place: int = field(default=0, init=False)
    _rows: Iterator[Rows] = field(default=iter(()), init=False)

    def batch(self, number: int) -> LabelledBatch:
        """Returns the batch of this number, which is higher than the one before."""
        epoch, place = divmod(number, max(1, self.last_rows // self.batch_size))
        if epoch != self._epoch:
            order = _order(self.split, self.last_rows, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            self._rows, self._epoch, self._place = row_batches(order, self.batch_size, 0), epoch, 0
        rows = next(islice(self._rows, place - self._place, None))
        self._place = place + 1
        return _part(self.split, self.split.rows - self.last_rows + rows, 0, 1, self.counts, timed=self.timed)


def _order(split: Split, used: int, *, seed: int, epoch: int, shuffle: bool) -> Iterator[NDArray[np.int64]]:
    """Returns the order of the last `used` rows in a pass."""
    inputs, bags = split.inputs, split.inputs.bags
    arrays = (split.labels, inputs.categorical, inputs.numeric, inputs.share, inputs.keys)
    size = sum(array.nbytes for array in (*arrays, *(each.ids for each in bags)) if array is not None)
    huge = size * used > GLOBAL_SHUFFLE_BYTES * split.rows
    return shuffled(used, seed=seed, epoch=epoch, by_windows=huge) if shuffle else sequential(used)


def _part(
    split: Split, rows: NDArray[np.int64], rank: int, ranks: int, counts: IdCounts | None, *, timed: bool
) -> LabelledBatch:
    """Returns a rank's part of a global batch of these rows."""
    mine = rows[rank_slice(len(rows), rank, ranks)]
    return _batch(split, mine, counts, _newest(split, rows) if timed else None)


def _newest(split: Split, rows: NDArray[np.int64] | slice) -> int | None:
    """Returns the newest time stamp of some rows; None if all are missing."""
    assert split.timestamp is not None, "a schema with a ttl in the log's time has a time stamp"
    newest = int(split.timestamp[rows].max())
    return newest if newest != MISSING_STAMP else None


def eval_batches(
    split: Split, *, batch_size: int, rank: int = 0, ranks: int = 1, passes: int | None = None
) -> Iterator[LabelledBatch]:
    """Yields all rows of a split in their order, so many at a time; of several ranks, each those of its own part.

    With `passes` there are as many batches: the last ones have fewer rows if there would be fewer batches.
    """
    mine = rank_slice(split.rows, rank, ranks)
    passes = -(-(mine.stop - mine.start) // batch_size) if passes is None else passes
    start = mine.start
    for later in reversed(range(passes)):
        rows = slice(start, min(start + batch_size, mine.stop - later))
        yield _batch(split, rows)
        start = rows.stop


def even_batches(
    split: Split, *, most: int, rank: int = 0, ranks: int = 1, timed: bool = False
) -> Iterator[LabelledBatch]:
    """Yields all rows of a split in their order, in as few steps of at most `most` rows as hold them, of equal
    sizes up to one row; of several ranks, each yields its part of each step.

    If `timed`, each batch says its step's newest time stamp.
    """
    steps = -(-split.rows // most)
    for number in range(steps):
        step = rank_slice(split.rows, number, steps)
        size = step.stop - step.start
        part = rank_slice(size, rank, ranks)
        mine = slice(step.start + part.start, step.start + part.stop)
        yield _batch(split, mine, time=_newest(split, step) if timed else None, of_step=size)


def _batch(
    split: Split,
    rows: NDArray[np.int64] | slice,
    counts: IdCounts | None = None,
    time: int | None = None,
    of_step: int | None = None,
) -> LabelledBatch:
    inputs = split.inputs.slice(rows.start, rows.stop) if isinstance(rows, slice) else split.inputs.take(rows)
    return LabelledBatch(
        features=feature_batch(inputs),
        label_B=_tensor(split.labels[rows]),
        weight_B=None if split.weight is None else _tensor(split.weight[rows]),
        inverse_count_BT=None if counts is None else _tensor(counts.inverse(inputs)),
        time=time,
        of_step=of_step,
    )


# Batches on an accelerator ahead of their step: prepared by a thread, copied from pinned memory meanwhile.

AHEAD = 3
"""Number of batches prepared ahead."""


def on_device(batches: Iterator[LabelledBatch], device: torch.device) -> Iterator[LabelledBatch]:
    """Yields the batches on `device`; for the CPU as they are, since there preparing competes with the step.

    On CUDA a thread prepares and pins them, and the copy does not wait for the step before it. An error
    while a batch is prepared is raised where the batch would have come.
    """
    if device.type == "cpu":
        yield from batches
        return
    for batch in ahead((batch.pinned() for batch in batches), AHEAD):
        yield batch.to(device, non_blocking=True)
