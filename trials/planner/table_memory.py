"""Tables below the device, in host memory or on an SSD: the cache of their rows, and what it costs.

A cache has at least the rows of one batch, and otherwise what is left of the device's memory; each matrix of
tables has its share. How often a row is found there depends on how unevenly ids occur: if a log's ids were
counted, its tables tell (`Table.repeats`); elsewhere ids are taken to follow Zipf's law with exponent 1 over
the rows of their table, as ids of click logs about do, and to have been seen before.

Shapes: S stretches of rows that occur about equally often.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dhen.inputs.lift import TableGroup
from dhen.schema import Table, kept_rows
from trials.planner.table_placement import FP32_BYTES, ID_BYTES, ONE_PROCESS_ROW_STATE_BYTES, Placement
from trials.records.strategy import KIB, Strategy

# Memory of lookup and update of tables on several ranks, beside the tables: TorchRec's buffers, and gradients.
#
# What is held when was read from TorchRec 1.8 and counted on gloo ranks (docs/benchmarks/planner-memory.md). A
# shard looks up the ids of the whole batch, so its rank has these ids, and where each bag of them begins, from
# the lookup to the update. In the update gradients go the way back: joined over tables, put in the order of the
# ranks, sent. What differs from batch to batch is bounded above: how many ids are distinct.

DENSE_SUMS = 2
"""Dense tensors of a replicated table's size that its update holds: the gradients' sum and the step made of it."""


class Lookup(NamedTuple):
    """What the lookups of a step are about."""

    tables: Sequence[Table]
    dims: Sequence[int]
    """Length of each table's embeddings."""
    placement: Placement
    ranks: int
    examples: int
    """Examples per rank."""
    sent_bytes: int
    """Bytes of a pooled embedding's number, and of its gradient's, on the way to another rank."""
    rounding_bytes: int
    """Workspace in which replicated tables in fp16 are rounded."""
    repeats_rows: bool
    """Whether every distinct row is looked up once more for its L2 decay
    (`trials.training.embeddings.sharded`)."""


def kept_bytes(lookup: Lookup) -> int:
    """Returns what the fullest rank keeps of its lookups until the update of the tables, beside the embeddings:
    ids as they were received, where each bag begins, row numbers in replicated tables; with a second lookup of
    rows also these, and all embeddings that were looked up, which are saved for the decay."""
    placement, batch = lookup.placement, lookup.ranks * lookup.examples
    by_name = {table.name: table for table in lookup.tables}
    by_rank = [list[Table]() for _ in range(lookup.ranks)]
    for shard in placement.shards:
        by_rank[shard.rank].append(by_name[shard.table])
    most = 0.0
    for rank, here in enumerate(by_rank):
        received = placement.id_bytes_per_rank[rank]
        if lookup.repeats_rows and here:
            distinct = [min(table.rows, table.mean_ids * batch) for table in here]
            bags = batch + max(distinct)
            columns = placement.all_to_all_bytes_per_rank[rank] / lookup.sent_bytes / batch
            received += ID_BYTES * (sum(distinct) + len(here) * bags) + FP32_BYTES * bags * columns
        else:
            received += ID_BYTES * len(here) * batch
        most = max(most, received)
    replicated = (table.mean_ids for table in lookup.tables if table.name in placement.replicated)
    return round(most + sum(replicated) * lookup.examples * ID_BYTES)


def update_bytes(lookup: Lookup) -> int:
    """Returns what the update of the tables takes beside the dense part's gradients, the embeddings' included.

    TorchRec updates its shards in backward, which comes to them first. Then gradients of replicated tables are
    made, as sparse tensors, and these tables are updated from dense sums of them. Categorical and multi-hot tables
    in one matrix have a sparse gradient each, which are copied into one.
    """
    placement, sent_bytes = lookup.placement, lookup.sent_bytes
    # gradients of pooled embeddings: joined over tables, a copy for each rank, these in one tensor; then what is
    # sent and what arrives, which becomes fp32 again
    here, arrived = _pooled_here(lookup), round(max(placement.all_to_all_bytes_per_rank))
    if sent_bytes == FP32_BYTES:
        moments = [3 * here, 2 * here + arrived]
    else:
        sent = here + here * sent_bytes // FP32_BYTES + arrived
        moments = [3 * here, sent, arrived + arrived * FP32_BYTES // sent_bytes]
    # a row and its number for each id, by length of embeddings and whether tables are multi-hot
    sparse: dict[tuple[int, bool], float] = defaultdict(float)
    named = set(placement.replicated)
    for table, dim in zip(lookup.tables, lookup.dims, strict=True):
        if table.name in named:
            size = lookup.examples * table.mean_ids * (FP32_BYTES * dim + ID_BYTES)
            sparse[dim, table.multi_hot] += size
    joined = (
        sparse[dim, True] + sparse[dim, False]
        for dim, multi_hot in list(sparse)
        if multi_hot and (dim, False) in sparse
    )
    dense = DENSE_SUMS * placement.replicated_gradient_bytes + lookup.rounding_bytes
    beside = max(dense, round(max(joined, default=0)))
    embeddings = FP32_BYTES * lookup.examples * sum(lookup.dims)
    return embeddings + max(*moments, round(sum(sparse.values())) + beside)


def lookup_bytes(lookup: Lookup) -> int:
    """Returns what a lookup takes for a moment: pooled embeddings of the shards here, a copy that is sent, and
    what arrives."""
    pooled = round(max(lookup.placement.all_to_all_bytes_per_rank) * FP32_BYTES / lookup.sent_bytes)
    return 2 * pooled + _pooled_here(lookup)


def _pooled_here(lookup: Lookup) -> int:
    """Returns the embeddings of this rank's examples from all shards, in fp32."""
    sized = zip(lookup.tables, lookup.dims, strict=True)
    columns = sum(dim for table, dim in sized if table.name not in lookup.placement.replicated)
    return FP32_BYTES * lookup.examples * columns


# Memory of lookup and update of tables in one process, beside the tables: what a gradient needs, and its sums.
#
# One process has the tables of one length in one matrix. `embedding_bag` saves what its gradient needs from the
# lookup to backward; then gradients have a row for each id, and `trials.optim.rowwise_adagrad` sums those of one
# row, takes its step, and rounds what is kept in fp16.

INT64_BYTES = 8
BAG_INDICES = 3
"""Integers (int64) that `embedding_bag` keeps per bag: where it begins, its size, a place for maxima. Per id it
keeps one, the bag it belongs to."""
COLUMNS_PER_ROW = 3
"""Widths of an embedding held for each row that is updated: its gradients' sum, its weights, their squares
(trials/optim/rowwise_adagrad.py)."""
ROWS_BESIDE_ROUNDING = 2
"""Widths of those `COLUMNS_PER_ROW` that are still held while new weights are rounded."""
INDICES_AN_ID = 2
"""Integers (int64) held for each id beside the gradient's own index while gradients are summed: places and
representatives (trials/optim/rowwise_adagrad.py)."""
ROW_NUMBERS = 2
"""Integers (int64) held for each row that is updated: while gradients are summed, its number and the place of its
first lookup; then its number, the optimizer's sum and the mean of squares that is added to it, in fp32."""


def saved_bytes(tables: Sequence[Table], multi_hot: Sequence[Table], examples: int) -> int:
    """Returns what the lookup of so many examples saves for its gradient: row numbers, and of bags, which are of
    `multi_hot`, also what `embedding_bag` keeps."""
    saved = sum(table.mean_ids for table in tables)
    saved += sum(table.mean_ids + BAG_INDICES for table in multi_hot)
    return round(examples * INT64_BYTES * saved)


def one_rank_update_bytes(
    groups: Sequence[TableGroup],
    tables: Sequence[Table],
    examples: int,
    rounding_bytes: Callable[[int], int],
) -> int:
    """Returns what the update of the tables takes: gradients of all matrices, which `groups` says, and what the
    dearest of their updates takes beside them. `rounding_bytes` says what rounding so many numbers takes."""
    all_gradients = most = 0
    for group in groups:
        here, width = [tables[index] for index in group.places], FP32_BYTES * group.dim
        ids = [table.mean_ids * examples for table in here]
        rows = [min(table.rows, count) for table, count in zip(here, ids, strict=True)]
        joined = len({table.multi_hot for table in here}) - 1  # gradients of both kinds of tables, or none
        gradients = round(sum(ids) * (width + INT64_BYTES))
        summing = round(sum(rows) * (width + ROW_NUMBERS * INT64_BYTES))
        steps = sum(rows) * (COLUMNS_PER_ROW - 1) * width
        summing += round(max(steps, sum(ids) * INDICES_AN_ID * INT64_BYTES))
        numbers = round(sum(rows)) * group.dim
        rounding = ROWS_BESIDE_ROUNDING * numbers * FP32_BYTES + rounding_bytes(numbers)
        all_gradients += gradients
        most = max(most, summing, rounding, joined * gradients)
    return all_gradients + most


INDEX_BYTES = 4 + 4
"""Host memory for each row below the device: where it is in the cache, and how often it has occurred."""
STORED_STATE_BYTES = 4
"""Row-wise Adagrad's sum of a row, as it lies below the device."""
MOST_BAG = 2
"""Times the mean number of ids of bags that a batch's bags are taken to have at most."""
LEFT_FREE = 0.02
"""Share of a device's memory that a cache leaves free, for predictions are not exact."""
FIND_SECONDS = 0.13e-6
"""Seconds in which an id's row is looked for in the cache and counted (docs/benchmarks/table-levels.md)."""
ROW_SECONDS = {"host": 0.35e-6, "ssd": 1e-6}
"""Seconds in which a row is brought in and another one written back, beside their bytes: in host memory as
measured there; an SSD is as fast as long as its pages are in memory, and is taken to be slower because they may
not be. A row that has to be read from a cold file took 33e-6 to 105e-6 (docs/benchmarks/table-levels.md): how many
have to be is not known to a plan."""


class HitRates(NamedTuple):
    """How often a cache that has the most frequent rows of some tables has the row of an id; straight lines
    between the sizes that are given."""

    row_S: NDArray[np.float64]
    """Sizes of caches in rows, ascending."""
    share_S: NDArray[np.float64]
    """The share of all ids whose row is there."""

    def share(self, cached: int) -> float:
        """Returns the share of ids whose row is in a cache of so many rows."""
        return float(np.interp(cached, self.row_S, self.share_S))


class Matrix(NamedTuple):
    """A matrix of tables of one embedding length."""

    rows: int
    least: int
    """The most rows that a batch may read: a cache has no fewer."""
    row_bytes: int
    """Bytes of a row in the cache, with its optimizer's state."""
    stored_bytes: int
    """Bytes of a row below the device."""
    ids: float
    """Number of ids that a batch looks up."""
    hits: HitRates
    """How often a cache has the row of an id."""


class OffloadedTables:
    """The tables of one rank as they lie below its device."""

    def __init__(
        self, groups: Sequence[TableGroup], tables: Sequence[Table], examples: int, weight_bytes: int
    ) -> None:
        """`examples` of the rank's batch; bytes of a weight as it is stored."""
        self._matrices = list[Matrix]()
        for group in groups:
            here = tuple(tables[place] for place in group.places)
            read = (examples * table.mean_ids * (MOST_BAG if table.multi_hot else 1) for table in here)
            matrix = Matrix(
                rows=sum(table.rows for table in here),
                least=sum(min(table.rows, math.ceil(most)) for table, most in zip(here, read, strict=True)),
                row_bytes=group.dim * weight_bytes + ONE_PROCESS_ROW_STATE_BYTES,
                stored_bytes=group.dim * weight_bytes + STORED_STATE_BYTES,
                ids=examples * sum(table.mean_ids for table in here),
                hits=hits_of(here),
            )
            self._matrices.append(matrix)
        self.least_bytes = sum(matrix.least * matrix.row_bytes for matrix in self._matrices)
        """Bytes of the smallest cache."""
        self.whole_bytes = sum(matrix.rows * matrix.row_bytes for matrix in self._matrices)
        """Bytes of a cache that has all rows."""

    def host_bytes(self, strategy: Strategy) -> int:
        """Returns what a rank takes of the host's memory: tables that lie there, and what is known of each row.
        Pages of a file that are held in memory can be had back, and do not count."""
        in_memory = strategy.tables == "host"
        return sum(m.rows * (INDEX_BYTES + in_memory * m.stored_bytes) for m in self._matrices)

    def cached_rows(self, cache_kib: int) -> tuple[int, ...]:
        """Returns the rows of each matrix that a cache of this size has: those of a batch, and of what is left the
        same share of every matrix."""
        spare, rest = KIB * cache_kib - self.least_bytes, self.whole_bytes - self.least_bytes
        share = min(1.0, max(0.0, spare / rest)) if rest else 1.0
        return tuple(matrix.least + int(share * (matrix.rows - matrix.least)) for matrix in self._matrices)

    def cache_bytes(self, cache_kib: int) -> int:
        """Returns the bytes that a cache of this size really takes."""
        rows = zip(self._matrices, self.cached_rows(cache_kib), strict=True)
        return sum(matrix.row_bytes * count for matrix, count in rows)

    def seconds(self, strategy: Strategy, bandwidth: float) -> float:
        """Returns the seconds of a step in which rows are looked for, brought in and written back, on a link or a
        memory of so many bytes/s."""
        seconds = 0.0
        for matrix, held in zip(self._matrices, self.cached_rows(strategy.table_cache), strict=True):
            missed = matrix.ids * (1.0 - matrix.hits.share(held))
            copied = ROW_SECONDS[strategy.tables] + 2 * matrix.row_bytes / bandwidth
            seconds += matrix.ids * FIND_SECONDS + missed * copied
        return seconds

    def hit_rate(self, cache_kib: int) -> float:
        """Returns the share of all ids whose row is in a cache of this size."""
        rows = zip(self._matrices, self.cached_rows(cache_kib), strict=True)
        found = sum(matrix.ids * matrix.hits.share(held) for matrix, held in rows)
        return found / max(sum(matrix.ids for matrix in self._matrices), 1e-9)


@lru_cache(maxsize=64)
def hits_of(tables: tuple[Table, ...]) -> HitRates:
    """Returns how often a cache of the rows that occur most, of all these tables together, has the row of an id.

    Rows of a table between two numbers that are known are taken to occur equally often. Then the stretches of all
    tables come into the cache in the order of how often their rows occur.
    """
    of_tables = [stretches(table) for table in tables]
    rows, found = (np.concatenate(parts) for parts in zip(*of_tables, strict=True))
    order = np.argsort(-found / rows, kind="stable")
    share_S = np.append(0.0, np.cumsum(found[order])) / max(sum(table.mean_ids for table in tables), 1e-9)
    return HitRates(np.append(0.0, np.cumsum(rows[order])), share_S)


def stretches(table: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the number of rows in each stretch (S), and how many ids of an example it has (S)."""
    rows = np.array(kept_rows(table.rows), dtype=np.float64)
    shares = np.array(table.repeats or [_harmonic(each) / _harmonic(table.rows) for each in rows])
    return np.diff(rows, prepend=0.0), table.mean_ids * np.diff(shares, prepend=0.0)


def _harmonic(n: float) -> float:
    """H(n) of a whole number above 0, by Euler's expansion."""
    return math.log(n) + 0.5772156649 + 0.5 / n - 1 / (12 * n * n)
