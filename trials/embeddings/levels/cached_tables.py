"""Tables of one process that lie on a level of storage below its device: in host memory, or on an SSD.

Training reads and updates a cache on the device (`trials.embeddings.levels.row_cache`), so that the bytes of a
table do not count to the device's memory; evaluation reads the level below directly, and leaves the cache as it
is. Where rows lie changes no number: training is equal to the bit to that of `trials.embeddings.local`."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.inputs.features import Tables, matrices
from trials.embeddings.blocks import State, blocks_of, load_state, state_of, state_to_load
from trials.embeddings.engine import backward, leaves
from trials.embeddings.fp16 import in_half
from trials.embeddings.growing import Begun, begin_rows
from trials.embeddings.levels.row_cache import CacheUse, RowCache
from trials.job import TrainingConfig
from trials.memory.limit import count_on_device, on_host
from trials.optim.rowwise_adagrad import RowWiseAdagrad
from trials.strategy import TableLevel

LOG = logging.getLogger(__name__)


class CachedTables:
    """A `TableEngine` of one process whose device has some rows of each matrix."""

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
        assert not config.table_decay
        if config.table_precision == "fp16":
            with on_host():
                tables = in_half(tables)
        self.level, self._where, self._whole = level, where, tables
        whole = matrices(tables)
        weights = [
            _cache_of(matrix.weight, rows, where)
            for matrix, rows in zip(whole.values(), cached_rows, strict=True)
        ]
        # a copy of all but the weights, whose copies are the caches
        parts = zip(whole.values(), weights, strict=True)
        self._held = copy.deepcopy(tables, {id(matrix.weight): weight for matrix, weight in parts}).to(where)
        count_on_device(self._held.buffers())
        self._optimizer = RowWiseAdagrad(
            weights, lr=config.embedding_learning_rate, decay=config.embedding_decay
        )
        self._rate = config.embedding_learning_rate
        sums = [self._optimizer.state_of(weight)["sum"] for weight in weights]
        with on_host():
            of_each = zip(whole.values(), matrices(self._held).values(), sums, strict=True)
            self._caches = [RowCache(matrix, held, sum_C, level) for matrix, held, sum_C in of_each]
            self._blocks = blocks_of(list(whole.values()), [cache.sum_R for cache in self._caches])
        caches = zip(weights, self._caches, strict=True)
        self._optimizer.row_numbers = {weight: cache.row_C for weight, cache in caches}
        self._firsts = {
            table.name: (cache, first)
            for matrix, cache in zip(whole.values(), self._caches, strict=True)
            for table, first in zip(
                matrix.tables, itertools.accumulate([0, *(t.rows for t in matrix.tables)]), strict=False
            )
        }
        """Of each table the cache of its matrix, and its first row there."""
        self._weights, self._looked_up = weights, list[Tensor]()
        LOG.info("tables: %s; on the device %s rows", level, " + ".join(f"{rows:,}" for rows in cached_rows))

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state on the device."""
        state = [values for weight in self._weights for values in self._optimizer.state_of(weight).values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._weights, *state))

    @property
    def table_cache(self) -> int:
        """Size of the caches, in KiB."""
        return -(-self.held_bytes // 1024)

    @property
    def cache_use(self) -> CacheUse:
        """What the caches of all matrices have done so far."""
        return CacheUse.of_all(cache.use for cache in self._caches)

    def lookup(self, features: FeatureBatch, begun: Begun | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`."""
        if not torch.is_grad_enabled():
            self.settle()
            return leaves(e.to(self._where) for e in self._whole(features.to(torch.device("cpu"))))
        with on_host():
            if begun is not None:
                for name, its in begun.tables.items():
                    cache, first = self._firsts[name]
                    cache.drop(begun.rows[its] + first)
                begin_rows(self._blocks, begun)
            there = features.to(torch.device("cpu"))
            for matrix, cache in zip(matrices(self._whole).values(), self._caches, strict=True):
                cache.hold(matrix.rows(there))
        self._looked_up = self._held(features)
        return leaves(self._looked_up)

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """See `TableEngine`."""
        backward(self._looked_up, embeddings)
        self._looked_up = []
        self._optimizer.step()
        for weight, cache in zip(self._weights, self._caches, strict=True):
            weight.grad = None
            cache.changed()

    def scale_learning_rate(self, factor: float) -> None:
        """See `TableEngine`."""
        self._optimizer.param_groups[0]["lr"] = self._rate * factor

    def settle(self) -> None:
        """Brings the level below up to date."""
        with on_host():
            for cache in self._caches:
                cache.write_back()

    def full_weights(self) -> dict[str, Tensor] | None:
        """See `TableEngine`."""
        self.settle()
        weights = {name: matrix.weight.detach() for name, matrix in matrices(self._whole).items()}
        with on_host():
            return {name: weight.to("cpu", torch.float32, copy=True) for name, weight in weights.items()}

    def state_dict(self, saved: Collection[str] | None = None) -> State:
        """See `TableEngine`; also holds what makes a resumed training equal to the bit."""
        self.settle()
        parts = state_of(self._blocks) if saved is None else state_to_load(saved, self._blocks)
        return parts | self._optimizer.progress(saved)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `TableEngine`."""
        load_state(state, self._blocks)
        self._optimizer.go_on(state)
        self._forget()

    def _forget(self) -> None:
        for cache in self._caches:
            cache.forget()


def _cache_of(weight: nn.Parameter, rows: int, where: torch.device) -> nn.Parameter:
    """Returns a parameter of so many rows of the device, for a cache of a matrix."""
    made = nn.Parameter(
        torch.zeros(min(rows, len(weight)), weight.shape[1], dtype=weight.dtype, device=where)
    )
    if weight.dtype == torch.float16:
        made.grad_dtype = torch.float32
    return made
