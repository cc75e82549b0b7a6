"""The cost of an embedding table, or of a few of its columns, to a rank in one step: bytes held, moved and sent.

A shard looks up the ids of the whole batch for its columns and sends pooled embeddings to all ranks; a
replicated table looks up a rank's own examples and all-reduces its gradient. Traffic follows FBGEMM's fused
kernels: forward reads a row an id, backward reads a gradient an id and updates each row once. Transfers are
those of `collectives`, without their latency, which is the same however tables lie. Left out: the sort of
ids in backward, and what caches save where the same ids come often. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from dhen.cost import NUMBER_BYTES
from dhen.schema import Table
from trials.cluster.cluster import Cluster
from trials.planner.collectives import collectives
from trials.planner.device_constants import MEMORY_SHARE

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
bytes cost as much. A CPU's line is 64; its tables lie in one process, where nothing is split."""


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
