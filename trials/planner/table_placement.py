"""The places of embedding tables: replicated if small, else column shards over all ranks, balanced by cost.

`spread` splits and places them by cost. If that balanced placement exceeds the memory there is, the compact one
counts: the same procedure with bytes for the cost, and nothing replicated. Neither depends on the memory, so more
memory never loses a placement. Rows are not split (TorchRec does not offer that on CPUs).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from dhen.cost import NUMBER_BYTES
from dhen.errors import UserError
from dhen.schema import Table
from trials.cluster.cluster import Cluster, byte_words
from trials.planner.collectives import MEMORY_SHARE, collectives
from trials.records.job import TrainingConfig

# Columns of embedding tables over ranks, longest processing time first (LPT; Graham, 1969, doi 10.1137/0117039).
#
# The dearest shard goes to the cheapest rank. Tables are split as far as balance needs and no further, for
# every shard of a table receives the table's ids again and has optimizer state of its own:
#
# 1. at first into the fewest even parts of which none exceeds a rank's mean, in load or in bytes (about: each
#    part adds what a shard costs whatever its width);
# 2. then a shard that would lift the cheapest rank beyond the mean (and a tolerance) is halved instead, down to
#    `NARROWEST` columns.
#
# Two rounds balance memory as well. Tables that weigh on memory go first, and pass over ranks that would
# exceed the mean of their bytes; the others follow, fill up the loads, and bring few bytes. No rank has two
# shards of one table. What a shard loads a rank with, and its bytes, come from outside.

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


class ShardPrice(NamedTuple):
    """What a shard adds to a rank."""

    load: float
    """The quantity that is balanced, in any unit."""
    held_bytes: int


Pricing = Callable[[int, int], ShardPrice]
"""A function from a table's place in the list and a number of its columns to their price."""


class Shard(NamedTuple):
    """Some columns of a table, all rows; shards compare in the order in which they are placed."""

    round: int
    order: float
    """Minus the shard's share of a rank's mean, in load or in bytes, whichever is larger."""
    table: int
    first_column: int
    columns: int
    price: ShardPrice


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

    def share(price: ShardPrice) -> float:
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
# ids in backward, and what caches save if the same ids come often. Nothing here was measured on a GPU.

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
"""Further bytes per row in one process if `table_decay` is used: the float64 of
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


# The placement: which tables are replicated, and the shards of all others.

KEPT = 128
"""Number of placements kept for the next candidate: a study has one set of tables and a few embedding
dimensions."""


class SizedTable(NamedTuple):
    """A table, and how many columns it has."""

    table: Table
    dim: int


class TableShard(NamedTuple):
    """Columns `first_column` up to `first_column + columns` of all rows of a table, on one rank."""

    table: str
    rank: int
    first_column: int
    columns: int


class Placement(NamedTuple):
    """The places of all tables, and their costs in a step; tuples `_per_rank` have an entry for each rank."""

    replicated: tuple[str, ...]
    """Tables that every rank holds whole: the small ones, or all of them if there is one rank."""
    shards: tuple[TableShard, ...]
    """Shards of all other tables, by table and column; no rank holds two shards of one table."""
    bytes_per_rank: tuple[int, ...]
    """Bytes of weights and optimizer state."""
    cost_per_rank: tuple[float, ...]
    """Seconds of lookup, update and every transfer, one after another."""
    lookup_bytes_per_rank: tuple[float, ...]
    """Memory traffic of lookup and update."""
    all_to_all_bytes_per_rank: tuple[float, ...]
    """Pooled embeddings sent in forward (backward returns as many), a rank's part for itself included."""
    id_bytes_per_rank: tuple[float, ...]
    """Ids received in forward, a rank's part from itself included."""
    replicated_gradient_bytes: int
    """Dense gradients of the replicated tables, held and all-reduced by every rank; 0 on one rank."""

    @property
    def heaviest_bytes(self) -> int:
        """Weights and optimizer state on the fullest rank."""
        return max(self.bytes_per_rank)


class PlacementError(UserError):
    """The tables do not fit, however they are placed."""

    def __init__(self, message: str, lacking_bytes: int) -> None:
        super().__init__(message)
        self.lacking_bytes = lacking_bytes
        """The tables would fit if each rank had so many more bytes for them."""


def place(
    tables: tuple[Table, ...],
    dim: int | tuple[int, ...],
    cluster: Cluster,
    *,
    global_batch: int,
    memory_bytes: int | None = None,
    row_state_bytes: int = ROW_STATE_BYTES,
    weight_bytes: int = FP32_BYTES,
    sent_bytes: int = FP32_BYTES,
) -> Placement:
    """Returns the balanced placement of tables, or the compact one if only the compact one fits.

    Args:
        tables: all tables of one model.
        dim: length of an embedding: one for all tables, or one for each.
        cluster: the ranks, with their links and memory bandwidth.
        global_batch: examples of a step over all ranks.
        memory_bytes: what tables may take on a rank; None for any amount.
        row_state_bytes: optimizer state for each row of each shard; tables trained in one process have more
            (`ONE_PROCESS_ROW_STATE_BYTES`).
        weight_bytes: bytes of a weight, as tables are stored.
        sent_bytes: bytes of a pooled embedding's number on its way to another rank.

    Raises:
        PlacementError: when neither placement fits, with the bytes that are lacking.
        UserError: for a dimension or batch below 1.
    """
    dims = (dim,) * len(tables) if isinstance(dim, int) else dim
    for name, size in (("embedding_dim", min(dims, default=1)), ("batch_size", global_batch)):
        if size < 1:
            raise UserError(f"{name}: expected at least 1, received {size}.")
    work = Workload(global_batch, row_state_bytes, weight_bytes, sent_bytes)
    sized = tuple(SizedTable(table, columns) for table, columns in zip(tables, dims, strict=True))
    balanced = _balanced(sized, work, cluster)
    if memory_bytes is None or balanced.heaviest_bytes <= memory_bytes:
        return balanced
    compact = _compact(sized, work, cluster)
    if compact.heaviest_bytes <= memory_bytes:
        return compact
    needed = min(balanced.heaviest_bytes, compact.heaviest_bytes)
    raise PlacementError(_why(sized, work, cluster, needed, memory_bytes), needed - memory_bytes)


@lru_cache(maxsize=KEPT)
def _balanced(tables: tuple[SizedTable, ...], work: Workload, cluster: Cluster) -> Placement:
    """Places by cost; the fullest rank holds no more bytes than it would on half as many ranks, which seldom
    needs a second look."""
    placement = _by_cost(tables, work, cluster, math.inf)
    if cluster.ranks == 1:
        return placement
    hosts, in_host = cluster.hosts, cluster.gpus_per_host
    half = cluster.replace(**({"hosts": hosts // 2} if hosts > 1 else {"gpus_per_host": in_host // 2}))
    # what the fullest of these ranks holds at least: the mean without splitting, or one narrowest shard
    mean = sum(held_bytes(*table, work) for table in tables) / half.ranks
    narrowest = max((_narrowest_bytes(table, work, half.ranks) for table in tables), default=0)
    if placement.heaviest_bytes <= max(mean, narrowest):
        return placement
    most_bytes = _balanced(tables, work, half).heaviest_bytes
    if placement.heaviest_bytes > most_bytes:
        placement = _by_cost(tables, work, cluster, most_bytes)
    if placement.heaviest_bytes > most_bytes:
        placement = min(
            placement, _compact(tables, work, cluster), key=lambda candidate: candidate.heaviest_bytes
        )
    return placement


def _by_cost(
    tables: tuple[SizedTable, ...], work: Workload, cluster: Cluster, most_bytes: float
) -> Placement:
    """Replicates small tables and shards the others by cost; no rank holds more than `most_bytes` if that
    can be."""
    speed = rates(cluster)
    replicated = {table for table in tables if _better_replicated(table, work, speed)}
    sharded = [table for table in tables if table not in replicated]

    @cache
    def price(table: int, columns: int) -> ShardPrice:
        cost = sharded_cost(sharded[table].table, columns, work, speed)
        return ShardPrice(cost.seconds, cost.held_bytes)

    copied = sum(held_bytes(*table, work) for table in replicated)
    dims = [table.dim for table in sharded]
    shards = spread(dims, cluster.ranks, price, most_bytes=most_bytes - copied)
    return _placement([t for t in tables if t in replicated], sharded, shards, work, cluster)


@lru_cache(maxsize=KEPT)
def _compact(tables: tuple[SizedTable, ...], work: Workload, cluster: Cluster) -> Placement:
    """Shards all tables by bytes; one rank leaves no choice."""
    if cluster.ranks == 1:
        return _by_cost(tables, work, cluster, math.inf)

    @cache
    def price(table: int, columns: int) -> ShardPrice:
        size = held_bytes(tables[table].table, columns, work)
        return ShardPrice(size, size)

    shards = spread([table.dim for table in tables], cluster.ranks, price)
    return _placement([], list(tables), shards, work, cluster)


def _narrowest_bytes(sized: SizedTable, work: Workload, ranks: int) -> int:
    """Returns the bytes of the widest shard of a table that is split as finely as it can be."""
    return held_bytes(sized.table, narrowest_width(sized.dim, ranks), work)


def _better_replicated(sized: SizedTable, work: Workload, speed: Rates) -> bool:
    """Tells whether a rank spends less on its own copy than on its share of the table's shards, in time and
    memory.

    Time: all-reducing a gradient of the table's size stands against sending and fetching embeddings of a
    rank's examples. Memory: with no more rows than a rank has examples, a copy takes no more than the
    embeddings of those examples.
    """
    if speed.ranks == 1:
        return True
    if sized.table.rows * speed.ranks > work.global_batch:
        return False
    share = sharded_cost(*sized, work, speed).seconds / speed.ranks
    return replicated_cost(*sized, work, speed).seconds <= share


def _placement(
    replicated: list[SizedTable],
    sharded: list[SizedTable],
    shards: list[tuple[Shard, int]],
    work: Workload,
    cluster: Cluster,
) -> Placement:
    """Returns the placement of these tables and shards, with costs added up by rank."""
    speed = rates(cluster)
    copies = [replicated_cost(*table, work, speed) for table in replicated]
    costs: list[list[TableCost]] = [list(copies) for _ in range(cluster.ranks)]
    for shard, rank in shards:
        costs[rank].append(sharded_cost(sharded[shard.table].table, shard.columns, work, speed))
    return Placement(
        replicated=tuple(table.name for table, _ in replicated),
        shards=tuple(
            TableShard(sharded[shard.table].table.name, rank, shard.first_column, shard.columns)
            for shard, rank in shards
        ),
        bytes_per_rank=tuple(sum(cost.held_bytes for cost in rank) for rank in costs),
        cost_per_rank=tuple(sum(cost.seconds for cost in rank) for rank in costs),
        lookup_bytes_per_rank=tuple(sum(cost.lookup_bytes for cost in rank) for rank in costs),
        all_to_all_bytes_per_rank=tuple(sum(cost.pooled_bytes for cost in rank) for rank in costs),
        id_bytes_per_rank=tuple(sum(cost.id_bytes for cost in rank) for rank in costs),
        replicated_gradient_bytes=(
            sum(gradient_bytes(*table) for table in replicated) if cluster.ranks > 1 else 0
        ),
    )


def _why(
    tables: tuple[SizedTable, ...], work: Workload, cluster: Cluster, needed: int, available: int
) -> str:
    """Says why tables do not fit and what would work; names the table that fits nowhere if there is
    one."""
    available = max(available, 0)
    largest, dim = max(tables, key=lambda table: _narrowest_bytes(table, work, cluster.ranks))
    columns = narrowest_width(dim, cluster.ranks)
    bytes_per_row = columns * work.weight_bytes + work.row_state_bytes
    has = f"with its optimizer's state, and a rank has {byte_words(available)} for tables."
    if largest.rows * bytes_per_row > available:
        subject = "it" if columns == dim else f"a shard of {columns} of its {dim} columns"
        return (
            f"table {largest.name!r} fits on no rank: {subject} takes "
            f"{byte_words(largest.rows * bytes_per_row)} "
            f"{has} {available // bytes_per_row:,} of its {largest.rows:,} rows would fit: merge rare ids, "
            "or give ranks more memory."
        )
    half = ", training.table_precision=fp16" if work.weight_bytes == FP32_BYTES else ""
    return (
        f"the tables do not fit: the fullest of {cluster.ranks} ranks would hold {byte_words(needed)} "
        f"{has.replace('its', 'their')} More ranks, more memory per rank, a smaller embedding_dim{half} or fewer "
        "rows would do."
    )


def table_notes(training: TrainingConfig, placement: Placement, device: str) -> tuple[str, ...]:
    """Returns what a reader should know of tables in fp16 and of quantized all-to-all, if they do less
    than they could, in sentences; `device` is `cpu` or `cuda`."""
    notes = []
    if training.table_precision == "fp16" and placement.shards and device == "cpu":
        notes.append(
            "training.table_precision=fp16: FBGEMM's kernels for CPUs round updates of sharded tables to the "
            "nearest, and lose those below 1/2048 of a weight; on GPUs, on one rank, and for tables that all "
            "ranks hold whole, rounding is stochastic."
        )
    if training.all_to_all_precision != "fp32" and not placement.shards:
        notes.append(
            f"training.all_to_all_precision={training.all_to_all_precision} changes nothing here: every rank has "
            "all tables, and sends no embeddings."
        )
    return tuple(notes)
