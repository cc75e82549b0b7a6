"""Growing tables while they train: keys are admitted, given rows, and give way to others.

A key without a row is counted until it has occurred `admit_after` times within a pass; then it has the free row
with the lowest number. Where there is none, a sixteenth of the table gives way at once, so that choosing it costs
little for each key: those that occurred least often (`lfu`), or were not seen for longest (`lru`), but none of the
batch at hand. Occurrences are halved each time as many keys have given way as the table holds, so that what was
popular once does not stay for ever. A row begins anew with its key: with weights that follow from key and seed,
and fresh optimizer state.

All ranks see the keys of the whole batch, and so do the same without asking each other.

Shapes: N keys of a batch, M of those that are new in a table, T growing tables, R rows, C columns of a part.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.inputs.features import EMBEDDING_INIT_STD
from dhen.inputs.growing import GrowingRows
from dhen.inputs.key_index import EMPTY
from trials.collectives import gathered
from trials.embeddings.admission_filter import AdmissionFilter
from trials.embeddings.blocks import HeldBlock, State
from trials.memory.limit import count_on_host, on_host
from trials.ranks import Ranks

LOG = logging.getLogger(__name__)
EVICTED_SHARE = 1 / 16
"""Share of a table's rows that give way at once; also the share of `ttl` after which rows are looked through."""
KEYS, PROGRESS = "keys", "growing"
"""Prefixes of the names in checkpoints: of the keys of each table, and of all else."""
TABLE_WEIGHTS = ("weight.", f"{KEYS}.")
"""Beginnings of names in a table state: of weights, and of the keys that rows of growing tables belong to."""
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants (Steele et al., OOPSLA 2014), as signed numbers."""


class Begun(NamedTuple):
    """Rows that have begun to belong to other keys, those of a table one after another."""

    rows: Tensor
    """Rows as their table counts them, int64."""
    keys: Tensor
    """Keys as the index has them."""
    tables: dict[str, slice]
    """Which of them are each table's, by its name."""
    seed: int
    """Seed from which, with the keys, fresh weights follow."""


class GrowingTables:
    """Gives rows of growing tables to keys, on one rank or on all alike."""

    def __init__(self, rows: GrowingRows, ranks: Ranks) -> None:
        """Takes over the rows that keys have so far."""
        self._rows, self._ranks = rows, ranks
        self._rules = [table.growing for table in rows.tables if table.growing is not None]
        self._seed = torch.initial_seed()
        with on_host():
            total, tables = len(rows.keys), len(rows.tables)
            self._occurred = torch.zeros(total, dtype=torch.int32)
            self._seen = torch.zeros(total, dtype=torch.int64)
            self._steps = torch.zeros(1, dtype=torch.int64)
            self._gave_way = torch.zeros(tables, dtype=torch.int64)
            """Keys of each table that gave way since occurrences were halved."""
            waiting = [rule.capacity for rule in self._rules if rule.admit_after > 1]
            self._filter = AdmissionFilter(sum(waiting)) if waiting else None
            self._least_T = torch.tensor([rule.admit_after for rule in self._rules])
            self._go_on()
        count_on_host([rows.keys])
        self._said: set[str] = set()

    @torch.no_grad()
    def admit(self, batch: FeatureBatch) -> tuple[FeatureBatch, Begun | None]:
        """Returns a batch of this rank with rows in place of keys, and the rows that begin anew, None where there
        are none; a collective."""
        assert batch.keys is not None
        with on_host():
            mine_N, number_N = self._rows.salted(batch.keys), self._rows.table_of(batch.keys)
            key_N = mine_N
            if self._ranks.world > 1:
                key_N, number_N = gathered(self._ranks, torch.stack([mine_N, number_N], dim=1)).unbind(1)
            self._steps += 1
            row_N = self._rows.index.find(key_N)
            self._note(row_N)
            self._expire()
            new = ((row_N == 0) & (key_N != EMPTY)).nonzero().squeeze(1)
            begun = self._begin(key_N[new], number_N[new]) if len(new) else None
            if self._ranks.world > 1:
                row_N = self._rows.index.find(mine_N)
            elif begun is not None:
                row_N[new] = self._rows.index.find(key_N[new])
            return self._rows.with_rows(batch, row_N), begun

    def begin_pass(self) -> None:
        """Forgets the occurrences of keys without a row: what is rare in one pass is rare in the next."""
        if self._filter is not None:
            self._filter.clear()

    def state(self) -> State:
        """Returns all that decides about rows, for a checkpoint; loading into it needs `restored` afterwards."""
        parts = zip(self._rows.tables, self._rows.spans, strict=True)
        keys = {f"{KEYS}.{table.name}": self._rows.keys[span] for table, span in parts}
        named = {
            "occurred": self._occurred,
            "seen": self._seen,
            "steps": self._steps,
            "gave_way": self._gave_way,
        }
        if self._filter is not None:
            named |= {"filter": self._filter.counts, "filtered": self._filter.occurrences}
        return keys | {f"{PROGRESS}.{name}": tensor for name, tensor in named.items()}

    def restored(self) -> None:
        """Goes on from what was loaded into `state()`."""
        with on_host():
            self._rows.build_index()
            self._go_on()

    def _go_on(self) -> None:
        free = (
            (self._rows.keys[span] == EMPTY).nonzero().squeeze(1) + span.start for span in self._rows.spans
        )
        self._free = list(free)
        """Free rows of each table, in order."""

    def _note(self, row_N: Tensor) -> None:
        self._occurred.index_add_(0, row_N, torch.ones_like(row_N, dtype=torch.int32))
        self._occurred[0] = 0
        self._seen[row_N] = self._steps

    def _expire(self) -> None:
        for number, rule in enumerate(self._rules):
            if rule.ttl is not None and int(self._steps) % max(1, round(rule.ttl * EVICTED_SHARE)) == 0:
                taken = self._taken(number)
                self._take_back(number, taken[self._seen[taken] <= self._steps - rule.ttl])

    def _begin(self, key_N: Tensor, number_N: Tensor) -> Begun | None:
        """Gives rows to keys that have none and occurred often enough; None where there are none such."""
        once, inverse, times = torch.unique(key_N, return_inverse=True, return_counts=True)
        number = torch.empty_like(once).scatter_(0, inverse, number_N)
        waits = self._least_T[number] > 1
        if self._filter is not None and waits.any():
            times[waits] = self._filter.count(once[waits], times[waits])
            admitted = times >= self._least_T[number]
            once, number, times = once[admitted], number[admitted], times[admitted]
        number, order = number.sort(stable=True)
        sizes = number.bincount(minlength=len(self._rules)).tolist()
        by_table = zip(once[order].split(sizes), times[order].split(sizes), strict=True)
        given = {table: self._rows_for(table, *its) for table, its in enumerate(by_table) if sizes[table]}
        if not given:
            return None
        row_N, key_N, time_N = (torch.cat(parts) for parts in zip(*given.values(), strict=True))
        self._rows.index.add(key_N, row_N)
        self._rows.keys[row_N] = key_N
        self._occurred[row_N] = time_N.to(torch.int32)
        self._seen[row_N] = self._steps
        local = [row_M - self._rows.starts[table] for table, (row_M, _, _) in given.items()]
        ends = itertools.pairwise(itertools.accumulate(map(len, local), initial=0))
        tables = {self._rows.tables[table].name: slice(*its) for table, its in zip(given, ends, strict=True)}
        return Begun(torch.cat(local), key_N, tables, self._seed)

    def _rows_for(self, table: int, key_M: Tensor, times_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns free rows of a table, and the keys that have them with their occurrences; where rows are too few
        even so, the keys that occurred most often."""
        if len(self._free[table]) < len(key_M):
            self._evict(table, len(key_M) - len(self._free[table]))
        given = min(len(self._free[table]), len(key_M))
        if given < len(key_M):
            self._say_too_small(table)
            most = times_M.argsort(descending=True, stable=True)[:given].sort().values
            key_M, times_M = key_M[most], times_M[most]
        row_M, self._free[table] = self._free[table][:given], self._free[table][given:]
        return row_M, key_M, times_M

    def _taken(self, number: int) -> Tensor:
        """Returns the rows of a table that belong to keys, in order."""
        span = self._rows.spans[number]
        return self._rows.keys[span].nonzero().squeeze(1) + span.start

    def _evict(self, number: int, needed: int) -> None:
        """Takes back the rows of the keys that are worth least, of none that this batch has."""
        rule = self._rules[number]
        taken = self._taken(number)
        taken = taken[self._seen[taken] < self._steps]
        count = min(len(taken), max(needed, math.ceil(rule.capacity * EVICTED_SHARE)))
        if not count:
            return
        worth = self._seen[taken]
        if rule.evict == "lfu":
            worth = worth + (self._occurred[taken].to(torch.int64) << 32)
        bound = worth.kthvalue(count).values
        below, at = (worth < bound).nonzero().squeeze(1), (worth == bound).nonzero().squeeze(1)
        self._take_back(number, taken[torch.cat([below, at[: count - len(below)]])])

    def _take_back(self, number: int, row_N: Tensor) -> None:
        if not len(row_N):
            return
        self._rows.index.remove(self._rows.keys[row_N])
        self._rows.keys[row_N] = EMPTY
        self._free[number] = torch.cat([self._free[number], row_N]).sort().values
        self._gave_way[number] += len(row_N)
        if int(self._gave_way[number]) >= self._rules[number].capacity:
            self._occurred[self._rows.spans[number]] >>= 1
            self._gave_way[number] = 0

    def _say_too_small(self, number: int) -> None:
        table = self._rows.tables[number]
        if table.name not in self._said:
            self._said.add(table.name)
            LOG.warning(
                "table %r: capacity %d is less than the ids of one batch; those that find no row share the default"
                " row. Give it more capacity, or train with smaller batches.",
                table.name,
                table.rows - 1,
            )


@torch.no_grad()
def begin_rows(held: Iterable[HeldBlock], begun: Begun | None, scale: float = 1.0) -> None:
    """Begins rows anew in the parts of tables that a rank holds: fresh weights, divided by `scale`, and sums of
    gradients from zero."""
    if begun is None:
        return
    mine = [(part, begun.tables[part.block.table]) for part in held if part.block.table in begun.tables]
    columns = max((part.block.first_column + part.block.columns for part, _ in mine), default=0)
    with on_host():
        fresh_NC = _fresh(begun.keys, begun.seed, columns).div_(scale)
    for (block, weight_RC, sum_R), its in mine:
        rows = begun.rows[its].to(weight_RC.device)
        weights = fresh_NC[its, block.first_column : block.first_column + block.columns]
        weight_RC.index_copy_(0, rows, weights.to(weight_RC))
        sum_R.index_fill_(0, rows, 0.0)


def growing_rows(model: nn.Module) -> GrowingRows | None:
    """Returns the rows of a model's growing tables; None where it has none."""
    return next((module for module in model.modules() if isinstance(module, GrowingRows)), None)


def _fresh(key_N: Tensor, seed: int, columns: int) -> Tensor:
    """Returns normal numbers (N x columns) that follow from key, seed and column alone (Box and Muller 1958)."""
    column_C = torch.arange(1, columns + 1)
    bits_NC = _mixed(_mixed(key_N ^ seed).unsqueeze(1) + column_C * _GOLDEN)
    halves = ((bits_NC >> 32) & (2**32 - 1), bits_NC & (2**32 - 1))
    radius_NC, turn_NC = ((half.double() + 0.5) / 2.0**32 for half in halves)
    normal_NC = (radius_NC.log_() * -2.0).sqrt_() * (turn_NC * (2.0 * math.pi)).cos_()
    return normal_NC.mul_(EMBEDDING_INIT_STD).float()


def _mixed(h: Tensor) -> Tensor:
    """SplitMix64's finaliser."""
    h = (h ^ ((h >> 30) & (2**34 - 1))) * _FIRST
    h = (h ^ ((h >> 27) & (2**37 - 1))) * _SECOND
    return h ^ ((h >> 31) & (2**33 - 1))
