"""When a server answers a pull, and when it applies a push: the three ways to keep workers together.

All have the same methods. They are called with the server's lock held, and wait on it (`threading.Condition`)
for other workers' messages. `version` is the number of steps whose updates are in the tables.

W workers push W parts of a step's gradients. Async: they are applied as they come. Semi: too, but a pull for
step t waits until the updates of all steps before t - s are there, with s the staleness (stale synchronous
parallel, NIPS 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"). With a
deterministic delay the updates of step t - s and later wait in turn until all pulls for step t have been
answered, and are applied in the order of workers. Sync: a step's gradients are added up by row and applied once,
and the next pulls wait for it.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trials.records.job import TablesConfig
from trials.training.servers.part import Gradients, ServerPart


class BatchKeys(NamedTuple):
    """Keys of growing tables that a worker's part of a batch has, each once."""

    key_K: Tensor
    table_K: Tensor
    """Number of each key's table."""
    times_K: Tensor
    """How often each occurs."""
    time: int | None
    """Newest time stamp of the step."""


class Async:
    """Every worker on its own; the other ways are made from this one."""

    def __init__(self, part: ServerPart, workers: int, staleness: int, lock: threading.Condition) -> None:
        """`part` has the server's rows."""
        self._part, self._workers, self._staleness, self._lock = part, workers, staleness, lock
        self.lost = 0
        """Number of rows whose update was left out, as they had gone to other keys."""

    def hear(self, worker: int, pushed: int) -> None:
        """Notes that a worker has connected, which has pushed the updates of so many steps, be it to a server that
        this one is in the place of: nothing to do if no step waits for another, or no server comes back."""

    def admit(self, worker: int, step: int, keys: BatchKeys) -> Tensor:
        """Returns the rows of a worker's keys."""
        return self._part.admit(*keys)

    def pull(self, step: int, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], int]:
        """Returns rows for a step, and the number of earlier steps whose updates they lack; how many updates of
        workers on their own comes from server 0, which hands out batches."""
        return self._part.read(rows, dtype), 0

    def push(self, worker: int, step: int, gradients: Gradients) -> None:
        """Takes a worker's part of a step's gradients."""
        self.lost += self._part.update(gradients)

    def drain(self, step: int) -> None:
        """Waits until the updates of all steps before `step` are in the tables; what a worker on its own has
        pushed before is there."""

    def begin(self, step: int) -> None:
        """Goes on from the tables as they are after so many steps."""


class Semi(Async):
    """At most so many steps behind."""

    def __init__(self, part: ServerPart, workers: int, staleness: int, lock: threading.Condition) -> None:
        super().__init__(part, workers, staleness, lock)
        self._pushed = [0] * workers
        """Number of steps whose updates each worker has pushed."""

    @property
    def _version(self) -> int:
        return min(self._pushed)

    def hear(self, worker: int, pushed: int) -> None:
        """See `Async`: what was pushed to a server that is gone counts, as nobody pushes it again."""
        self._pushed[worker] = max(self._pushed[worker], pushed)
        self._lock.notify_all()

    def pull(self, step: int, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], int]:
        """See `Async`."""
        self._lock.wait_for(lambda: self._version >= step - self._staleness)
        return self._part.read(rows, dtype), max(0, step - self._version)

    def push(self, worker: int, step: int, gradients: Gradients) -> None:
        """See `Async`."""
        super().push(worker, step, gradients)
        self._pushed[worker] = step + 1
        self._lock.notify_all()

    def drain(self, step: int) -> None:
        """See `Async`."""
        self._lock.wait_for(lambda: self._version >= step)

    def begin(self, step: int) -> None:
        """See `Async`."""
        self._pushed = [step] * len(self._pushed)


class FixedDelay(Async):
    """Exactly so many steps behind."""

    def __init__(self, part: ServerPart, workers: int, staleness: int, lock: threading.Condition) -> None:
        super().__init__(part, workers, staleness, lock)
        self._version = self._drained = 0
        self._waiting = defaultdict[int, dict[int, Gradients]](dict)
        self._pulled = Counter[int]()

    def pull(self, step: int, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], int]:
        """See `Async`."""
        self._lock.wait_for(lambda: self._version >= max(step - self._staleness, self._drained))
        read, behind = self._part.read(rows, dtype), step - self._version
        self._pulled[step] += 1
        self._apply()
        return read, behind

    def push(self, worker: int, step: int, gradients: Gradients) -> None:
        """See `Async`."""
        self._waiting[step][worker] = gradients
        self._apply()

    def drain(self, step: int) -> None:
        """See `Async`; all workers drain at the same step."""
        self._drained = step
        self._apply()
        self._lock.wait_for(lambda: self._version >= step)

    def begin(self, step: int) -> None:
        """See `Async`."""
        self._version = self._drained = step
        self._waiting.clear()
        self._pulled.clear()

    def _apply(self) -> None:
        """Applies the updates of the steps whose turn it is: all parts are there, and nobody has still to read the
        rows without them."""
        while len(self._waiting[self._version]) == self._workers and (
            self._version < self._drained or self._pulled[self._version + self._staleness] == self._workers
        ):
            for _, gradients in sorted(self._waiting.pop(self._version).items()):
                self.lost += self._part.update(gradients)
            self._pulled.pop(self._version, None)
            self._version += 1
        self._lock.notify_all()


class Sync(Async):
    """One update per step, of all workers' gradients together."""

    def __init__(self, part: ServerPart, workers: int, staleness: int, lock: threading.Condition) -> None:
        super().__init__(part, workers, staleness, lock)
        self._version = 0
        self._keys = defaultdict[int, dict[int, BatchKeys]](dict)
        self._rows = dict[int, dict[int, Tensor]]()
        self._waiting = dict[int, Gradients]()

    def admit(self, worker: int, step: int, keys: BatchKeys) -> Tensor:
        """See `Async`: the keys of the whole batch are admitted together, as on ranks that hold tables."""
        self._keys[step][worker] = keys
        if len(self._keys[step]) == self._workers:
            workers, parts = zip(*sorted(self._keys.pop(step).items()), strict=True)
            key_K, table_K, times_K = (
                torch.cat(columns) for columns in zip(*(k[:3] for k in parts), strict=True)
            )
            time = max((keys.time for keys in parts if keys.time is not None), default=None)
            rows = self._part.admit(key_K, table_K, times_K, time)
            of_workers = torch.split(rows, [len(keys.key_K) for keys in parts])
            self._rows[step] = dict(zip(workers, of_workers, strict=True))
            self._lock.notify_all()
        self._lock.wait_for(lambda: step in self._rows)
        mine = self._rows[step].pop(worker)
        if not self._rows[step]:
            del self._rows[step]
        return mine

    def pull(self, step: int, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[tuple[Tensor, ...], int]:
        """See `Async`."""
        self.drain(step)
        return self._part.read(rows, dtype), 0

    def push(self, worker: int, step: int, gradients: Gradients) -> None:
        """See `Async`."""
        self._waiting[worker] = gradients
        if len(self._waiting) == self._workers:
            merged = _merged([self._waiting[each] for each in sorted(self._waiting)])
            super().push(worker, step, merged)
            self._waiting.clear()
            self._version += 1
            self._lock.notify_all()

    def drain(self, step: int) -> None:
        """See `Async`."""
        self._lock.wait_for(lambda: self._version >= step)

    def begin(self, step: int) -> None:
        """See `Async`."""
        self._version = step
        self._waiting.clear()


def synchronised(config: TablesConfig, part: ServerPart, workers: int, lock: threading.Condition) -> Async:
    """Returns the way that a training asks for."""
    semi = FixedDelay if config.deterministic_delay else Semi
    kind = {"async": Async, "semi": semi, "sync": Sync}[config.synchrony]
    return kind(part, workers, config.steps_behind, lock)


def _merged(parts: Sequence[Gradients]) -> Gradients:
    """Returns gradients of several workers added up by row (gradient merge), in the order of workers."""
    if len(parts) == 1:
        return parts[0]
    rows, gradients = [], []
    for of_matrix in zip(*((zip(part.rows, part.gradients, strict=True)) for part in parts), strict=True):
        row_N = torch.cat([row_U for row_U, _ in of_matrix])
        once, place_N = torch.unique(row_N, return_inverse=True)
        summed = of_matrix[0][1].new_zeros(len(once), of_matrix[0][1].shape[1])
        gradients.append(summed.index_add_(0, place_N, torch.cat([gradient for _, gradient in of_matrix])))
        rows.append(once)
    decay, read_at = parts[0].decay * len(parts), min(part.read_at for part in parts)
    return parts[0]._replace(rows=tuple(rows), gradients=tuple(gradients), decay=decay, read_at=read_at)
