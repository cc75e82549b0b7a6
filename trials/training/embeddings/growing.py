"""Growing tables while they train: keys are admitted, given rows, and give way to others.

A key without a row is counted until it has occurred `admit_after` times within a pass; then it has the free
row with the lowest number. If there is none, it may take another's, never one of the batch at hand:

`lru`: the row of the key that was not seen for longest.
`lfu`: the row of the key that occurs least often, if the new one surely occurs more often: by more than three
standard deviations of the difference of their counts. One that is merely as frequent would lose what the other
has learnt, and soon lose its own to the next. A key whose count has come to nothing gives way to any but those as
rare as the rarest twentieth of the keys that still occur. As in TinyLFU (arXiv 1512.00727) counts of keys with and
without rows are halved together, so that they are of late, and comparable: when ten times as many ids have
occurred as there are rows, once a table is full.

Which key gives way is found among some rows, four for each that is wanted, that are spread over the table and
others each time; if that is all rows, it is the least of all.

By `ttl` a key gives its row back that was not seen for so many steps, or for so long by the log's time stamps.
Now is then the newest stamp of the batches so far, so that rows which come late take nothing back; it begins
anew with each pass, as the log does, and rows that keys had before count as seen when it begins.

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
from dhen.inputs.growing import EMBEDDING_INIT_STD, EMPTY, GrowingRows
from trials.records.strategy import Ranks
from trials.training.embeddings.blocks import State, TableBlock
from trials.training.memory_limit import count_on_host, on_host
from trials.training.process_group import gathered

# Counts the occurrences of keys that have no row yet: a count-min sketch that forgets.
#
# Two rows of small counters, each key's in both; the least of the two is its count (Cormode and Muthukrishnan,
# J. Algorithms 2005), raised conservatively: a counter rises to the count of the key that raises it and no
# further (Estan and Varghese, SIGCOMM 2002). A count is never too low, so no key is admitted too late. It is too
# high if both counters are another key's too: with n keys counted in W counters, with a probability of at
# most (1 - e^(-n/W))^2, near 6 % if it is `crowded`, with W / 4 keys. Who counts with it halves all counters
# then, or earlier, as TinyLFU does (arXiv 1512.00727); a key that occurred once is forgotten.
#
# Shapes: N keys, W counters of a row.

COUNTERS_PER_ROW = 8
"""Counters of each row of the sketch for each row of the tables."""
MOST = 255
"""Largest count, of one byte."""
_SECOND_HASH = 0x6C62272E07BB0142
"""An odd constant that the second row's places are multiplied with."""


class AdmissionFilter:
    """The counts of keys, by how often they occurred of late."""

    def __init__(self, rows: int) -> None:
        """`rows` is the number of rows of the tables that keys wait for."""
        width = 1 << (COUNTERS_PER_ROW * rows - 1).bit_length()
        self.counts = torch.zeros(2, width, dtype=torch.uint8)
        self.keys = torch.zeros(1, dtype=torch.int64)
        """Number of keys with a count, about."""
        self._mask = width - 1

    @property
    def crowded(self) -> bool:
        """Whether counts are too high too often: it should be halved."""
        return 4 * int(self.keys) > self.counts.shape[1]

    def count(self, key_N: Tensor, times_N: Tensor) -> Tensor:
        """Counts keys, each given once with the number of its occurrences; returns their counts so far (N)."""
        places = (key_N & self._mask, ((key_N * _SECOND_HASH) >> 32) & self._mask)
        held = [row[place].to(torch.int64) for row, place in zip(self.counts, places, strict=True)]
        least_N = torch.minimum(*held)
        self.keys += (least_N == 0).sum()
        count_N = (least_N + times_N).clamp_(max=MOST)
        for row, place in zip(self.counts, places, strict=True):
            row.scatter_reduce_(0, place, count_N.to(torch.uint8), "amax")
        return count_N

    def halve(self) -> None:
        """Halves all counts."""
        self.counts >>= 1
        self.keys.copy_((self.counts[0] > 0).sum())

    def count_on(self, counts: Tensor) -> None:
        """Goes on from the counts of a filter of as many counters or more, whose places are folded onto the fewer
        that there are here."""
        self.counts.copy_(counts.view(2, -1, self._mask + 1).amax(1))
        self.keys.copy_((self.counts[0] > 0).sum())

    def clear(self) -> None:
        """Forgets all counts."""
        self.counts.zero_()
        self.keys.zero_()


LOG = logging.getLogger(__name__)
LOOKED_AT, LOOKED_AT_LEAST = 4, 64
"""Rows that are looked at for each that has to give way, and at least."""
RARE = 0.05
"""Quantile of the counts of keys that still occur, below which a key is too rare to have a row."""
SURE = 3.0
"""Standard deviations of the difference of two counts by which one is surely higher."""
HALVED_AFTER = 10
"""Ids that occur, for each row of all tables, until counts are halved (TinyLFU's sample size)."""
MOST_IDS = 1 << 30
"""Ids that occur until counts are halved in any case: they are of 32 bits."""
LOOKED_THROUGH = 1 / 16
"""Share of `ttl` after which rows are looked through."""
NO_TIME = -(2**63)
"""Time before the first stamp of a pass."""
KEYS, PROGRESS = "keys", "growing"
"""Prefixes of the names in checkpoints: of the keys of each table, and of all else."""
TABLE_WEIGHTS = ("weight.", f"{KEYS}.")
"""Beginnings of names in a table state: of weights, and of the keys that rows of growing tables belong to."""
OF_EACH_ROW, CLOCKS = ("occurred", "seen", "seen_at"), ("steps", "now", "looked_at_time")
"""What a state has of the key of each row, and what steps and time stamps are counted by; after `PROGRESS`."""
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants (Steele et al., OOPSLA 2014), as signed numbers."""


class NewRows(NamedTuple):
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
            self._next = torch.zeros(tables, dtype=torch.int64)
            """Number of rows of each table that have been looked at."""
            self._timed = any(rule.ttl_milliseconds is not None for rule in self._rules)
            self._now = torch.full((1,), NO_TIME)
            self._seen_at = torch.full((total if self._timed else 0,), NO_TIME)
            """Newest time stamp so far when the key of each row was seen last."""
            self._looked_at_time = torch.zeros(tables, dtype=torch.int64)
            """Time at which each table was looked through last."""
            self._ids = torch.zeros(1, dtype=torch.int64)
            """Number of ids that have occurred since counts were halved."""
            counts = [rule.admit_after > 1 or rule.evict == "lfu" for rule in self._rules]
            waiting = sum(itertools.compress([rule.capacity for rule in self._rules], counts))
            self._filter = AdmissionFilter(waiting) if waiting else None
            self._least_T = torch.tensor([rule.admit_after for rule in self._rules])
            self._counted_T = torch.tensor(counts)
            self._strides = [_stride(rule.capacity) for rule in self._rules]
            self._go_on()
        count_on_host([rows.keys])
        self._said: set[str] = set()

    @torch.no_grad()
    def admit(self, batch: FeatureBatch, time: int | None = None) -> tuple[FeatureBatch, NewRows | None]:
        """Returns a batch of this rank with rows in place of keys, and the rows that begin anew, None if there
        are none; a collective. `time` is the newest time stamp of all ranks' parts of the batch."""
        assert batch.keys is not None
        with on_host():
            mine_N, number_N = self._rows.salted(batch.keys), self._rows.table_of(batch.keys)
            key_N = mine_N
            if self._ranks.world > 1:
                key_N, number_N = gathered(self._ranks, torch.stack([mine_N, number_N], dim=1)).unbind(1)
            row_N, begun = self.rows_of(key_N, number_N, time)
            if self._ranks.world > 1:
                row_N = self._rows.index.find(mine_N)
            return self._rows.with_rows(batch, row_N), begun

    def rows_of(
        self, key_N: Tensor, number_N: Tensor, time: int | None, times_N: Tensor | None = None
    ) -> tuple[Tensor, NewRows | None]:
        """Returns the rows of a step's keys, as `GrowingRows` numbers them, and those that begin anew.

        Args:
            key_N: keys as the index has them, the missing one too, each once or as often as it occurs.
            number_N: the number of each key's table.
            time: the step's newest time stamp.
            times_N: how often each occurs; None: once.
        """
        self._steps += 1
        if self._timed and time is not None:
            if int(self._now) == NO_TIME:
                self._seen_at.fill_(time)
                self._looked_at_time.fill_(time)
            self._now.clamp_(min=time)
        row_N = self._rows.index.find(key_N)
        counted_N = torch.ones_like(row_N) if times_N is None else times_N
        self._occurred.index_add_(0, row_N, counted_N.to(torch.int32))
        self._occurred[0] = 0
        self._see(row_N)
        self._ids += counted_N.sum()
        # counts are halved once enough ids have occurred since, or too many different ones
        full = any(
            rule.evict == "lfu" and not len(free) for rule, free in zip(self._rules, self._free, strict=True)
        )
        crowded = self._filter is not None and self._filter.crowded
        if crowded or int(self._ids) > (HALVED_AFTER * len(self._occurred) if full else MOST_IDS):
            self._occurred >>= 1
            self._ids.zero_()
            if self._filter is not None:
                self._filter.halve()
        self._expire()
        new = ((row_N == 0) & (key_N != EMPTY)).nonzero().squeeze(1)
        if not len(new):
            return row_N, None
        times = times_N[new] if times_N is not None else None
        begun = self._begin(key_N[new], number_N[new], times)
        if begun is not None:
            row_N[new] = self._rows.index.find(key_N[new])
        return row_N, begun

    def begin_pass(self) -> None:
        """Forgets the occurrences of keys without a row, since what is rare in one pass is rare in the next, and
        the time, which begins anew."""
        if self._filter is not None:
            self._filter.clear()
        self._now.fill_(NO_TIME)

    def state(self) -> State:
        """Returns all that decides about rows, for a checkpoint; loading into it needs `restored` afterwards."""
        parts = zip(self._rows.tables, self._rows.spans, strict=True)
        keys = {f"{KEYS}.{table.name}": self._rows.keys[span] for table, span in parts}
        named = {
            "occurred": self._occurred,
            "seen": self._seen,
            "steps": self._steps,
            "next": self._next,
            "ids": self._ids,
        }
        if self._timed:
            named |= {"now": self._now, "seen_at": self._seen_at, "looked_at_time": self._looked_at_time}
        if self._filter is not None:
            named |= {"filter": self._filter.counts, "filtered": self._filter.keys}
        return keys | {f"{PROGRESS}.{name}": tensor for name, tensor in named.items()}

    def count_on(self, counted: State, places: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Goes on from what was counted for all keys, if these tables have some of them; counts of occurrences
        since the last halving begin anew.

        Args:
            counted: the state of the tables with all keys; empty if nothing was counted.
            places: rows here, and the rows that their keys have there.
        """
        own = self.state()
        counted = {name: values for name, values in counted.items() if name.startswith(f"{PROGRESS}.")}
        for name in own.keys() & counted.keys():
            kind = name.removeprefix(f"{PROGRESS}.")
            if kind in CLOCKS:
                own[name].copy_(counted[name])
            for row_N, there_N in places if kind in OF_EACH_ROW else ():
                own[name][row_N] = counted[name][there_N]
        if self._filter is not None and counted:
            self._filter.count_on(counted[f"{PROGRESS}.filter"])

    def restored(self) -> None:
        """Goes on from what was loaded into `state()`."""
        with on_host():
            self._rows.build_index()
            self._go_on()

    def _go_on(self) -> None:
        self._free = [
            (self._rows.keys[span] == EMPTY).nonzero().squeeze(1) + span.start for span in self._rows.spans
        ]
        """Free rows of each table, in order."""

    def _see(self, row_N: Tensor) -> None:
        self._seen[row_N] = self._steps
        if self._timed:
            self._seen_at[row_N] = self._now

    def _expire(self) -> None:
        for number, rule in enumerate(self._rules):
            steps, time = rule.ttl_steps, rule.ttl_milliseconds
            if steps is not None and int(self._steps) % max(1, round(steps * LOOKED_THROUGH)) == 0:
                taken = self._taken(number)
                self._take_back(number, taken[self._seen[taken] <= self._steps - steps])
            now, looked_at = int(self._now), int(self._looked_at_time[number])
            if time is not None and now != NO_TIME and now - looked_at >= time * LOOKED_THROUGH:
                self._looked_at_time[number] = now
                taken = self._taken(number)
                self._take_back(number, taken[self._seen_at[taken] <= now - time])

    def _begin(self, key_N: Tensor, number_N: Tensor, times_N: Tensor | None) -> NewRows | None:
        """Gives rows to keys that have none and occurred often enough; None if there are none such."""
        once, inverse, times = torch.unique(key_N, return_inverse=True, return_counts=True)
        if times_N is not None:
            times = torch.zeros_like(once).index_add_(0, inverse, times_N)
        number = torch.empty_like(once).scatter_(0, inverse, number_N)
        counted = self._counted_T[number]
        if self._filter is not None and counted.any():
            times[counted] = self._filter.count(once[counted], times[counted])
            admitted = times >= self._least_T[number]
            once, number, times = once[admitted], number[admitted], times[admitted]
        number, order = number.sort(stable=True)
        sizes = number.bincount(minlength=len(self._rules)).tolist()
        by_table = zip(once[order].split(sizes), times[order].split(sizes), strict=True)
        given = {table: self._rows_for(table, *its) for table, its in enumerate(by_table) if sizes[table]}
        given = {table: its for table, its in given.items() if len(its[0])}
        if not given:
            return None
        row_N, key_N, time_N = (torch.cat(parts) for parts in zip(*given.values(), strict=True))
        self._rows.index.add(key_N, row_N)
        self._rows.keys[row_N] = key_N
        self._occurred[row_N] = time_N.to(torch.int32)
        self._see(row_N)
        local = [row_M - self._rows.starts[table] for table, (row_M, _, _) in given.items()]
        ends = itertools.pairwise(itertools.accumulate(map(len, local), initial=0))
        tables = {self._rows.tables[table].name: slice(*its) for table, its in zip(given, ends, strict=True)}
        return NewRows(torch.cat(local), key_N, tables, self._seed)

    def _rows_for(self, table: int, key_M: Tensor, times_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows of a table, and the keys that have them with their occurrences; if rows are too few, the
        keys that occurred most often."""
        wanted = len(key_M) - len(self._free[table])
        if wanted > 0:
            order = times_M.argsort(descending=True, stable=True)
            key_M, times_M = key_M[order], times_M[order]
            # rows whose turn it is are looked at, none of the batch's
            capacity, first = self._rules[table].capacity, int(self._next[table])
            count = min(capacity, max(LOOKED_AT_LEAST, LOOKED_AT * wanted))
            self._next[table] = (first + count) % capacity
            place = torch.arange(first, first + count) * self._strides[table] % capacity
            row = place + self._rows.spans[table].start
            row = row[(self._rows.keys[row] != EMPTY) & (self._seen[row] < self._steps)]
            grown = self._rows.tables[table]
            if len(row) < wanted and count == capacity and grown.name not in self._said:
                self._said.add(grown.name)
                LOG.warning(
                    "table %r: capacity %d is less than the ids of one batch; those that find no row share the "
                    "default row. Give it more capacity, or train with smaller batches.",
                    grown.name,
                    grown.rows - 1,
                )
            # those whose keys are worth least, the least first
            worth, is_lfu = self._seen[row], self._rules[table].evict == "lfu"
            if is_lfu:
                worth = worth + (self._occurred[row].to(torch.int64) << 32)
            least = row
            if wanted < len(row):
                kept = (worth <= worth.kthvalue(wanted).values).nonzero().squeeze(1)
                least, worth = row[kept], worth[kept]
            least = least[worth.argsort(stable=True)[:wanted]]
            if is_lfu:
                newcomers = times_M[len(self._free[table]) :]
                least = least[: _outnumbered(newcomers, self._occurred[least], self._occurred[row])]
            self._take_back(table, least)
        given = min(len(self._free[table]), len(key_M))
        row_M, self._free[table] = self._free[table][:given], self._free[table][given:]
        return row_M, key_M[:given], times_M[:given]

    def _taken(self, number: int) -> Tensor:
        """Returns the rows of a table that belong to keys, in order."""
        span = self._rows.spans[number]
        return self._rows.keys[span].nonzero().squeeze(1) + span.start

    def _take_back(self, number: int, row_N: Tensor) -> None:
        if not len(row_N):
            return
        self._rows.index.remove(self._rows.keys[row_N])
        self._rows.keys[row_N] = EMPTY
        self._free[number] = torch.cat([self._free[number], row_N]).sort().values


def _stride(capacity: int) -> int:
    """Returns a step that visits all places of a table before it comes to one again, spread evenly."""
    step = max(1, round(capacity * 0.6180339887))
    while math.gcd(step, capacity) > 1:
        step += 1
    return step


def _outnumbered(new: Tensor, least: Tensor, looked_at: Tensor) -> int:
    """Returns how many newcomers, the most frequent first, may each have the row of one of the least frequent, the
    least first; all by their counts, the last ones those of all that were looked at."""
    pairs = min(len(new), len(least))
    new, least = new[:pairs].double(), least[:pairs].double().clamp_(max=MOST)
    surely = new - least > SURE * (new + least).sqrt()
    occurring = looked_at[looked_at > 0].double()
    usual = new >= occurring.quantile(RARE).clamp_(max=MOST) if len(occurring) else new > 0
    return int((surely | (usual & (least == 0))).to(torch.int64).cumprod(0).sum())


@torch.no_grad()
def begin_rows(held: Iterable[TableBlock], begun: NewRows | None, scale: float = 1.0) -> None:
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
    """Returns the rows of a model's growing tables; None if it has none."""
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
