"""A cache on the device of the rows of one matrix, which lie on a level of storage below it.

What is trained is the cache. Rows that a batch reads are brought in before its lookup, with their optimizer
state, and take the places of those that have occurred least often so far; these are written back, if they
have changed since. A row keeps the number of times it has occurred while it is not in the cache, so the cache
comes to hold the rows that occur most (least frequently used, with exact counts).

Shapes: N ids of a batch, R rows of the matrix, C of which are in the cache, D columns.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.errors import UserError
from dhen.inputs.features import EmbeddingTables, Tables, matrices
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.records.job import TrainingConfig
from trials.records.strategy import TableLevel
from trials.store.user_cache import user_cache
from trials.training.embeddings.blocks import blocks_of, in_half
from trials.training.embeddings.engine import LocalTables, TableEngine, leaves
from trials.training.embeddings.growing import NewRows, begin_rows
from trials.training.memory_limit import count_on_device, on_host

LOOKED_FOR = 16
"""Parts of the cache, one of which is looked for at a time: the slots whose rows occur least, to be given away."""


@dataclasses.dataclass
class CacheUse:
    """What the caches of all matrices have done in training so far, counted."""

    steps: int = 0
    looked_up: int = 0
    """Number of ids looked up."""
    missed: int = 0
    """Number of them whose row was not in its cache."""
    copied_in: int = 0
    """Rows copied from the level below."""
    copied_out: int = 0
    """Rows copied to it."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the ids whose row was in the cache; None before there were any."""
        return 1.0 - self.missed / self.looked_up if self.looked_up else None

    @property
    def rows_a_step(self) -> float | None:
        """Rows copied to and from the cache per step; None before there was one."""
        return (self.copied_in + self.copied_out) / self.steps if self.steps else None


class RowCache:
    """The rows of a matrix that are on the device, and those below."""

    def __init__(
        self, whole: EmbeddingTables, held: EmbeddingTables, sum_C: Tensor, level: TableLevel, use: CacheUse
    ) -> None:
        """Begins with an empty cache; to be made `on_host`.

        Args:
            whole: all rows, in host memory; an `ssd` takes them over.
            held: the same tables, with a weight of C rows on the device.
            sum_C: row-wise Adagrad's sums of these.
            level: where the rows lie.
            use: counts what is done.
        """
        rows, slots = len(whole.weight), len(held.weight)
        self.sum_R = torch.zeros(rows) if level == "host" else on_ssd(torch.zeros(rows))
        """Row-wise Adagrad's sum of each row, beside the rows."""
        if level == "ssd":
            whole.weight.data = on_ssd(whole.weight.detach())
        self._weight_RD, self._weight_CD, self._sum_C = whole.weight.detach(), held.weight.detach(), sum_C
        self._names = ", ".join(table.name for table in whole.tables)
        self._slot_R = torch.full((rows,), -1, dtype=torch.int32)
        held.slots = self._slot_R
        self._occurred_R = torch.zeros(rows, dtype=torch.int32)
        self.row_C = torch.full((slots,), -1)
        """Row in each slot of the cache, -1 if it is free."""
        self._changed_C = torch.zeros(slots, dtype=torch.bool)
        self._batch_C = torch.zeros(slots, dtype=torch.int64)
        """Number of the batch that last read the slot."""
        self._batch = self._queued = 0
        self._queue = self.row_C[:0]
        """Slots to be given away, the one whose row has occurred least first, as they were at batch `_queued`."""
        self._slot_N = self.row_C[:0]
        self._use = use

    def hold(self, row_N: Tensor) -> None:
        """Brings in the rows that a batch reads; duplicates do no harm.

        Raises:
            UserError: if the cache has too few rows for the batch.
        """
        self._batch += 1
        self._occurred_R.index_add_(0, row_N, torch.ones_like(row_N, dtype=torch.int32))
        slot_N = self._slot_R[row_N]
        missed_N = row_N[slot_N < 0]
        self._batch_C[slot_N[slot_N >= 0].long()] = self._batch
        self._use.looked_up += len(row_N)
        if len(missed_N):
            self._use.missed += len(missed_N)
            rows = torch.unique(missed_N)
            slots = self._given_away(len(rows))
            self._write_back(slots[self._changed_C[slots]])
            before = self.row_C[slots]
            self._slot_R[before[before >= 0]] = -1
            self.row_C[slots], self._slot_R[rows] = rows, slots.int()
            there, device = slots.to(self._weight_CD.device), self._weight_CD.device
            self._weight_CD.index_copy_(0, there, self._weight_RD[rows].to(device))
            self._sum_C.index_copy_(0, there, self.sum_R[rows].to(device))
            self._use.copied_in += len(rows)
            slot_N = self._slot_R[row_N]
        self._slot_N = slot_N.long()

    def changed(self) -> None:
        """Notes that the rows of the last batch have been updated."""
        self._changed_C[self._slot_N] = True

    def write_back(self) -> None:
        """Brings the level below up to date."""
        self._write_back(self._changed_C.nonzero().squeeze(1))

    def drop(self, rows: Tensor) -> None:
        """Forgets rows that are given other values below."""
        slots = self._slot_R[rows]
        slots = slots[slots >= 0].long()
        self.row_C[slots], self._changed_C[slots] = -1, False
        self._slot_R[rows], self._occurred_R[rows] = -1, 0

    def forget(self) -> None:
        """Empties the cache, after all rows were given other values below."""
        self.row_C.fill_(-1)
        self._slot_R.fill_(-1)
        self._changed_C.fill_(False)
        self._queue = self._queue[:0]

    def _write_back(self, slots: Tensor) -> None:
        rows, there = self.row_C[slots], slots.to(self._weight_CD.device)
        self._weight_RD.index_copy_(0, rows, self._weight_CD[there].to(self._weight_RD.device))
        self.sum_R.index_copy_(0, rows, self._sum_C[there].to(self.sum_R.device))
        self._changed_C[slots] = False
        self._use.copied_out += len(slots)

    def _given_away(self, count: int) -> Tensor:
        """Returns so many slots that the batch does not read, those first whose rows have occurred least; the
        batch reads them from here on."""
        found: list[Tensor] = []
        while count:
            if not len(self._queue):
                free = self._batch_C < self._batch
                there = int(free.sum())
                if there < count:
                    raise UserError(
                        f"a batch reads more rows than the cache of tables {self._names} has, which are "
                        f"{len(self.row_C):,}: give a smaller training.batch_size, or more memory."
                    )
                most = torch.iinfo(torch.int32).max
                occurred_C = torch.where(self.row_C < 0, -1, self._occurred_R[self.row_C.clamp(min=0)])
                wanted = min(there, max(count, len(occurred_C) // LOOKED_FOR))
                self._queue = occurred_C.masked_fill_(~free, most).topk(wanted, largest=False).indices
                self._queued = self._batch - 1
            unread = self._queue[self._batch_C[self._queue] <= self._queued]
            found.append(unread[:count])
            self._batch_C[found[-1]] = self._batch
            self._queue = unread[count:]
            count -= len(found[-1])
        return torch.cat(found)


def on_ssd(tensor: Tensor) -> Tensor:
    """Returns a copy that lies in a file, mapped into memory, below `user_cache()`; its space is free again when
    the process ends, in whatever way. Rows that are not in memory are read one by one.

    Raises:
        OSError: if there is no space for it, before anything is written.
    """
    if tensor.numel() == 0:  # of several servers one may have no row of a small table
        return tensor
    folder = user_cache() / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # its name goes, and the mapping stays
        size = max(1, tensor.numel() * tensor.element_size())
        os.posix_fallocate(file.fileno(), 0, size)
        mapped = mmap.mmap(file.fileno(), size)
    # reading ahead brings in megabytes for a row (docs/benchmarks/table-levels.md)
    mapped.madvise(mmap.MADV_RANDOM)
    there = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel())
    return there.view(tensor.shape).copy_(tensor)


# Tables of one process that lie on a level of storage below its device: in host memory, or on an SSD.
#
# Training reads and updates a cache on the device, so that the bytes of a
# table do not count to the device's memory; evaluation reads the level below directly, and leaves the cache as
# it is. Where rows lie changes no number: training is equal to the bit to that of
# `trials.training.embeddings.engine`.

LOG = logging.getLogger(__name__)


class CachedTables(LocalTables):
    """The tables of one process whose device has some rows of each matrix."""

    def __init__(
        self,
        tables: Tables,
        config: TrainingConfig,
        level: TableLevel,
        cached_rows: Sequence[int],
        where: torch.device,
    ) -> None:
        """Takes the tables over.

        Args:
            tables: in host memory, where they stay, or from where an `ssd` takes them over.
            config: resolved, without table decay, which reads every row.
            level: where rows lie, `host` or `ssd`.
            cached_rows: number of rows on the device, for each matrix in order.
            where: the device.
        """
        TableEngine.__init__(self, config)
        assert not config.table_decay
        if config.table_precision == "fp16":
            with on_host():
                tables = in_half(tables)
        self.level, self._where, self._tables, self._matrices = level, where, tables, matrices(tables)
        whole, weights = self._matrices.values(), list[nn.Parameter]()
        for matrix, rows in zip(whole, cached_rows, strict=True):
            stored = matrix.weight
            cached = torch.zeros(min(rows, len(stored)), stored.shape[1], dtype=stored.dtype, device=where)
            weights.append(nn.Parameter(cached))
            if stored.dtype == torch.float16:
                weights[-1].grad_dtype = torch.float32
        # a copy of all but the weights, whose copies are the caches
        copies = {id(matrix.weight): weight for matrix, weight in zip(whole, weights, strict=True)}
        self._on_device = copy.deepcopy(tables, copies).to(where)
        count_on_device(self._on_device.buffers())
        self._optimizer = RowWiseAdagrad(
            weights, lr=config.embedding_learning_rate, decay=config.embedding_decay
        )
        sums = [self._optimizer.state_of(weight)["sum"] for weight in weights]
        self._use = CacheUse()
        with on_host():
            of_each = zip(whole, matrices(self._on_device).values(), sums, strict=True)
            self._caches = [RowCache(*each, level, self._use) for each in of_each]
            self._held = blocks_of(whole, [cache.sum_R for cache in self._caches])
        caches = zip(weights, self._caches, strict=True)
        self._optimizer.row_numbers = {weight: cache.row_C for weight, cache in caches}
        self._firsts = {
            table.name: (cache, first)
            for matrix, cache in zip(whole, self._caches, strict=True)
            for table, first in zip(matrix.tables, matrix.starts, strict=False)
        }
        """Of each table the cache of its matrix, and its first row there."""
        self._weights = weights
        LOG.info("tables: %s; on the device %s rows", level, " + ".join(f"{rows:,}" for rows in cached_rows))

    @property
    def table_cache(self) -> int:
        """Size of the caches, in KiB."""
        return -(-self.held_bytes // 1024)

    @property
    def cache_use(self) -> CacheUse:
        """What the caches have done so far."""
        return dataclasses.replace(self._use)

    def lookup(self, features: FeatureBatch, begun: NewRows | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`."""
        if not torch.is_grad_enabled():
            self.settle()
            return leaves(e.to(self._where) for e in self._tables(features.to(torch.device("cpu"))))
        with on_host():
            if begun is not None:
                for name, its in begun.tables.items():
                    cache, first = self._firsts[name]
                    cache.drop(begun.rows[its] + first)
                begin_rows(self._held, begun)
            there = features.to(torch.device("cpu"))
            self._use.steps += 1
            for matrix, cache in zip(self._matrices.values(), self._caches, strict=True):
                cache.hold(matrix.rows(there))
        self._looked_up = self._on_device(features)
        return leaves(self._looked_up)

    def step(self) -> None:
        """See `LocalTables`."""
        super().step()
        for cache in self._caches:
            cache.changed()

    def settle(self) -> None:
        """Brings the level below up to date."""
        with on_host():
            for cache in self._caches:
                cache.write_back()

    def full_weights(self) -> dict[str, Tensor] | None:
        """See `TableEngine`."""
        with on_host():
            return super().full_weights()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `TableEngine`."""
        super().load_state_dict(state)
        for cache in self._caches:
            cache.forget()
