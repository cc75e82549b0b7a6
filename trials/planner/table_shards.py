"""Columns of embedding tables over ranks, longest processing time first (LPT; Graham, 1969, doi 10.1137/0117039).

The dearest shard goes to the cheapest rank. Tables are split as far as balance needs and no further, for
every shard of a table receives the table's ids again and has optimizer state of its own:

1. at first into the fewest even parts of which none exceeds a rank's mean, in load or in bytes (about: each
   part adds what a shard costs whatever its width);
2. then a shard that would lift the cheapest rank beyond the mean (and a tolerance) is halved instead, down to
   `NARROWEST` columns.

Two rounds balance memory as well. Tables that weigh on memory go first, and pass over ranks that would
exceed the mean of their bytes; the others follow, fill up the loads, and bring few bytes. No rank has two
shards of one table. What a shard loads a rank with, and its bytes, come from outside.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dhen.cost import NUMBER_BYTES
from dhen.schema import Table
from trials.cluster.cluster import Cluster
from trials.planner.collectives import MEMORY_SHARE, collectives

NARROWEST = 4
"""Columns of the narrowest shard: FBGEMM's GPU kernels read rows as vectors of 4 values."""
LOAD_TOLERANCE = 0.02
"""Share of the mean by which a rank may exceed it before a shard is halved."""
BYTES_TOLERANCE = 0.1
"""Share of the mean of bytes by which a rank may exceed it; wider than `LOAD_TOLERANCE` because loads come
first."""
WEIGHS_ON_MEMORY = 0.5
"""Factor between shares: tables whose share of all bytes is more than so many times their share of all load
go in the first round. Of 0.25, 0.5 and 1 this one balanced both best, on generated tables with
Zipf-distributed sizes."""


class Price(NamedTuple):
    """What a shard adds to a rank."""

    load: float
    """The quantity that is balanced, in any unit."""
    held_bytes: int


Pricing = Callable[[int, int], Price]
"""A function from a table's place in the list and a number of its columns to their price."""


class Shard(NamedTuple):
    """Some columns of a table, all rows; shards compare in the order in which they are placed."""

    round: int
    order: float
    """Minus the shard's share of a rank's mean, in load or in bytes, whichever is larger."""
    table: int
    first_column: int
    columns: int
    price: Price


def spread(
    dims: Sequence[int], ranks: int, pricing: Pricing, *, most_bytes: float = math.inf
) -> list[tuple[Shard, int]]:
    """Returns shards of tables of so many columns each, with their ranks, by table and column.

    Ranks that would exceed `most_bytes` are passed over as long as there are others.
    """
    prices = [pricing(table, dim) for table, dim in enumerate(dims)]
    mean_load = sum(price.load for price in prices) / ranks or 1.0
    mean_bytes = sum(price.held_bytes for price in prices) / ranks or 1.0
    narrowest = [pricing(table, narrowest_width(dim, ranks)) for table, dim in enumerate(dims)]
    indivisible_bytes = max((price.held_bytes for price in narrowest), default=0)
    heavy = [price.held_bytes / mean_bytes > WEIGHS_ON_MEMORY * price.load / mean_load for price in prices]
    # the shards without a rank yet, and what all shards together load and hold, by round
    waiting: list[Shard] = []
    parts, total_load, total_bytes = [0] * len(dims), 0.0, [0, 0]

    def share(price: Price) -> float:
        return max(price.load / mean_load, price.held_bytes / mean_bytes)

    def add(table: int, first_column: int, widths: list[int]) -> None:
        """Adds shards of a table from a column on."""
        nonlocal total_load
        parts[table] += len(widths)
        for columns in widths:
            price, turn = pricing(table, columns), 0 if heavy[table] else 1
            heapq.heappush(waiting, Shard(turn, -share(price), table, first_column, columns, price))
            total_load += price.load
            total_bytes[turn] += price.held_bytes
            first_column += columns

    for table, (dim, price) in enumerate(zip(dims, prices, strict=True)):
        add(table, 0, _widths(dim, min(most_parts(dim, ranks), math.ceil(share(price)))))
    loads, held = [0.0] * ranks, [0] * ranks
    tables: list[set[int]] = [set() for _ in range(ranks)]
    by_load = [
        (0.0, rank) for rank in range(ranks)
    ]  # a heap; loads in it may be outdated, and are then too low
    placed = []
    while waiting:
        shard = heapq.heappop(waiting)
        bytes_limit = most_bytes
        if not shard.round:  # the largest indivisible shard always fits on an empty rank
            even = (1 + BYTES_TOLERANCE) * total_bytes[0] / ranks
            bytes_limit = min(max(even, indivisible_bytes), most_bytes)
        # the rank with the lowest load that has no shard of the table and has room below the limit
        passed_over: list[tuple[float, int]] = []
        cheapest: int | None = None
        while by_load and cheapest is None:
            load, rank = by_load[0]
            if load < loads[rank]:
                heapq.heapreplace(by_load, (loads[rank], rank))
            elif shard.table in tables[rank] or held[rank] + shard.price.held_bytes > bytes_limit:
                passed_over.append(heapq.heappop(by_load))
            else:
                cheapest = rank
        for entry in passed_over:
            heapq.heappush(by_load, entry)
        load_limit = (1 + LOAD_TOLERANCE) * total_load / ranks
        unwelcome = cheapest is None or loads[cheapest] + shard.price.load > load_limit
        # halves must be wide enough, and there must be a rank for each shard of the table
        if unwelcome and shard.columns >= 2 * NARROWEST and parts[shard.table] < ranks:
            parts[shard.table] -= 1
            total_load -= shard.price.load
            total_bytes[shard.round] -= shard.price.held_bytes
            add(shard.table, shard.first_column, _widths(shard.columns, 2))
            continue
        if cheapest is None:
            free = (rank for rank in range(ranks) if shard.table not in tables[rank])
            cheapest = min(free, key=lambda rank: (held[rank], loads[rank]))
        loads[cheapest] += shard.price.load
        held[cheapest] += shard.price.held_bytes
        tables[cheapest].add(shard.table)
        placed.append((shard, cheapest))
    return sorted(placed, key=lambda pair: (pair[0].table, pair[0].first_column))


def most_parts(dim: int, ranks: int) -> int:
    """Returns into how many shards a table can be split."""
    return max(1, min(dim // NARROWEST, ranks))


def narrowest_width(dim: int, ranks: int) -> int:
    """Returns the columns of the widest shard of a table that is split as finely as it can be."""
    return _widths(dim, most_parts(dim, ranks))[0]


def _widths(columns: int, count: int) -> list[int]:
    """Returns even widths in multiples of `NARROWEST`, wider ones first; the remainder goes to the first
    width."""
    units, remainder = divmod(columns, NARROWEST)
    units_per_width, wider = divmod(units, count)
    return [
        NARROWEST * (units_per_width + (index < wider)) + (remainder if index == 0 else 0)
        for index in range(count)
    ]


# The cost of an embedding table, or of a few of its columns, to a rank in one step: bytes held, moved and sent.
#
# A shard looks up the ids of the whole batch for its columns and sends pooled embeddings to all ranks; a
# replicated table looks up a rank's own examples and all-reduces its gradient. Traffic follows FBGEMM's fused
# kernels: forward reads a row an id, backward reads a gradient an id and updates each row once. Transfers are
# those of `collectives`, without their latency, which is the same however tables lie. Left out: the sort of
# ids in backward, and what caches save where the same ids come often. Nothing here was measured on a GPU.

FP32_BYTES = NUMBER_BYTES["fp32"]
"""Bytes of a pooled embedding's number before it is sent and after, and of its gradient's."""
ID_BYTES = 8
"""Bytes of an id: int64, as TorchRec sends ids and FBGEMM reads them."""
ROW_STATE_BYTES = 4
"""Bytes of row-wise Adagrad's fp32 sum, for each row of each column shard (FBGEMM, and
trials/optim/rowwise_adagrad.py)."""
ONE_PROCESS_ROW_STATE_BYTES = 4 + 8
"""State per row in one process: the sum, and the int64 through which trials/optim/rowwise_adagrad.py adds up
duplicates."""
TABLE_DECAY_ROW_BYTES = 8
"""Further bytes per row in one process where `table_decay` is used: the float64 of
trials/optim/rowwise_adagrad.py."""
SECTOR_BYTES = 32
"""The least that a GPU reads of its memory (CUDA C++ Best Practices Guide, coalesced access): rows of fewer
bytes cost as much. A CPU's line is 64; its tables lie in one process, if nothing is split."""


class Workload(NamedTuple):
    """The quantities that all tables have in common."""

    global_batch: int
    """Examples of all ranks together."""
    row_state_bytes: int
    """Optimizer state for each row of each shard."""
    weight_bytes: int = FP32_BYTES
    """Bytes of a weight, as tables are stored."""
    sent_bytes: int = FP32_BYTES
    """Bytes of a pooled embedding's number, and of its gradient's, on the way to another rank."""


class Rates(NamedTuple):
    """Seconds per byte on a rank of a cluster."""

    ranks: int
    memory: float
    """Seconds per byte read or written."""
    all_to_all: float
    """Seconds per byte sent in equal parts to all ranks."""
    all_reduce: float
    """Seconds per byte of the tensor that is reduced."""


def rates(cluster: Cluster) -> Rates:
    """Returns the rates of a cluster, between all of its ranks; a CPU's ranks share its memory."""
    share = (1.0 if cluster.verified else MEMORY_SHARE) / (
        cluster.gpus_per_host if cluster.device == "cpu" else 1
    )
    between = collectives(cluster, cluster.hosts, cluster.gpus_per_host)
    memory = 1 / (share * cluster.memory_bandwidth)
    return Rates(cluster.ranks, memory, between.all_to_all.beta, between.ring.beta)


class TableCost(NamedTuple):
    """The cost of one table or shard, on the rank that holds it, in one step."""

    seconds: float
    """Seconds of memory traffic at the memory's bandwidth, then of every transfer at its link's; nothing
    overlaps."""
    held_bytes: int
    """Bytes of weights and optimizer state."""
    lookup_bytes: float
    """Memory traffic of lookup and update, and of rounding what is sent."""
    pooled_bytes: float
    """Pooled embeddings sent in forward (their gradients come back in backward), the rank's own part included."""
    id_bytes: float
    """Ids received for the lookup, the rank's own part included."""


def sharded_cost(table: Table, columns: int, work: Workload, rates: Rates) -> TableCost:
    """Returns the cost of so many columns of a table on one rank, for the ids of the whole batch."""
    examples = work.global_batch
    lookup = _lookup_bytes(table, columns, examples, work)
    if (
        work.sent_bytes < FP32_BYTES
    ):  # rounded and back, forward and backward; a rank gets as many as it sends
        lookup += 4 * examples * columns * (FP32_BYTES + work.sent_bytes)
    pooled = float(examples * columns * work.sent_bytes)
    ids = examples * table.mean_ids * ID_BYTES
    seconds = lookup * rates.memory + (2 * pooled + ids) * rates.all_to_all
    return TableCost(seconds, held_bytes(table, columns, work), lookup, pooled, ids)


def replicated_cost(table: Table, dim: int, work: Workload, rates: Rates) -> TableCost:
    """Returns the cost of a whole table on every rank, each with its own examples; several ranks all-reduce a
    dense gradient."""
    lookup = _lookup_bytes(table, dim, work.global_batch / rates.ranks, work)
    if rates.ranks > 1:  # the gradient is cleared, added to, and read by the update, which writes weights
        lookup += 3 * gradient_bytes(table, dim) + table.rows * dim * work.weight_bytes
    seconds = lookup * rates.memory + gradient_bytes(table, dim) * rates.all_reduce
    return TableCost(seconds, held_bytes(table, dim, work), lookup, 0.0, 0.0)


def gradient_bytes(table: Table, dim: int) -> int:
    """Returns the bytes of the dense gradient of a replicated table."""
    return table.rows * dim * FP32_BYTES


def held_bytes(table: Table, columns: int, work: Workload) -> int:
    """Returns the bytes of weights and optimizer state of so many columns."""
    return table.rows * (columns * work.weight_bytes + work.row_state_bytes)


def _lookup_bytes(table: Table, columns: int, examples: float, work: Workload) -> float:
    """Returns the memory traffic of lookup, pooling, backward and update for so many examples."""
    ids = examples * table.mean_ids
    row, gradient = _sectors(columns * work.weight_bytes), _sectors(columns * FP32_BYTES)
    forward = ids * (row + ID_BYTES) + examples * columns * FP32_BYTES
    update = min(ids, table.rows) * 2 * (row + SECTOR_BYTES)  # weights and state, read and written
    backward = ids * (gradient + ID_BYTES) + update
    return forward + backward


def _sectors(row_bytes: int) -> int:
    """Returns the bytes that are moved to read a row."""
    return -(-row_bytes // SECTOR_BYTES) * SECTOR_BYTES
