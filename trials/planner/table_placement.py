"""The places of embedding tables: replicated where small, else column shards over all ranks, balanced by cost.

`lpt` splits and places them by the cost of `table_cost`. Where that balanced placement exceeds the memory there
is, the compact one counts: the same procedure with bytes for the cost, and nothing replicated. Neither
depends on the memory, so more memory never loses a placement. Rows are not split (TorchRec does not offer
that on CPUs).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dhen.errors import UserError
from dhen.schema import Table
from trials.cluster.cluster import Cluster, byte_words
from trials.planner.table_shards import (
    FP32_BYTES,
    ROW_STATE_BYTES,
    Price,
    Rates,
    Shard,
    TableCost,
    Workload,
    gradient_bytes,
    held_bytes,
    narrowest_width,
    rates,
    replicated_cost,
    sharded_cost,
    spread,
)

if TYPE_CHECKING:
    from trials.records.job import TrainingConfig

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
    """Returns the balanced placement of tables, or the compact one where only the compact one fits.

    Args:
        tables: all tables of one model.
        dim: length of an embedding: one for all tables, or one for each.
        cluster: the ranks, with their links and memory bandwidth.
        global_batch: examples of a step over all ranks.
        memory_bytes: what tables may take on a rank; None for any amount.
        row_state_bytes: optimizer state for each row of each shard; tables trained in one process have more
            (`table_cost.ONE_PROCESS_ROW_STATE_BYTES`).
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
    """Replicates small tables and shards the others by cost; no rank holds more than `most_bytes` where that
    can be."""
    speed = rates(cluster)
    replicated = {table for table in tables if _better_replicated(table, work, speed)}
    sharded = [table for table in tables if table not in replicated]

    @cache
    def price(table: int, columns: int) -> Price:
        cost = sharded_cost(sharded[table].table, columns, work, speed)
        return Price(cost.seconds, cost.held_bytes)

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
    def price(table: int, columns: int) -> Price:
        size = held_bytes(tables[table].table, columns, work)
        return Price(size, size)

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
    """Returns what a reader should know of tables in fp16 and of quantized all-to-all, where they do less
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
