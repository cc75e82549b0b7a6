"""Memory of lookup and update of tables on several ranks, beside the tables: TorchRec's buffers, and gradients.

What is held when was read from TorchRec 1.8 and counted on gloo ranks (docs/benchmarks/planner-memory.md). A
shard looks up the ids of the whole batch, so its rank has these ids, and where each bag of them begins, from the
lookup to the update. In the update gradients go the way back: joined over tables, put in the order of the ranks,
sent. What differs from batch to batch is bounded above: how many ids are distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dhen.schema import Table
from trials.planner.tables.placement import Placement
from trials.planner.tables.table_cost import FP32_BYTES, ID_BYTES

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
    (`trials.embeddings.fbgemm_cpu_decay`)."""


def kept_bytes(lookup: Lookup) -> int:
    """Returns what the fullest rank keeps of its lookups until the update of the tables, beside the embeddings:
    ids as they were received, where each bag begins, row numbers in replicated tables."""
    placement, batch = lookup.placement, lookup.ranks * lookup.examples
    replicated = [table for table in lookup.tables if table.name in placement.replicated]
    own = sum(table.mean_ids for table in replicated) * lookup.examples * ID_BYTES
    by_name, here = (
        {table.name: table for table in lookup.tables},
        [list[Table]() for _ in range(lookup.ranks)],
    )
    for shard in placement.shards:
        here[shard.rank].append(by_name[shard.table])
    by_rank = (_received_bytes(lookup, rank, tables, batch) for rank, tables in enumerate(here))
    return round(max(by_rank) + own)


def update_bytes(lookup: Lookup) -> int:
    """Returns what the update of the tables takes beside the dense part's gradients, the embeddings' included.

    TorchRec updates its shards in backward, which comes to them first. Then gradients of replicated tables are
    made, as sparse tensors, and these tables are updated from dense sums of them. Categorical and multi-hot tables
    in one matrix have a sparse gradient each, which are copied into one.
    """
    embeddings = FP32_BYTES * lookup.examples * sum(lookup.dims)
    dense = DENSE_SUMS * lookup.placement.replicated_gradient_bytes + lookup.rounding_bytes
    sparse = _sparse_bytes(lookup)
    beside = max(dense, round(max(_joined_bytes(sparse), default=0)))
    return embeddings + max(*_on_their_way(lookup), round(sum(sparse.values())) + beside)


def lookup_bytes(lookup: Lookup) -> int:
    """Returns what a lookup takes for a moment: pooled embeddings of the shards here, a copy that is sent, and
    what arrives."""
    pooled = round(max(lookup.placement.all_to_all_bytes_per_rank) * FP32_BYTES / lookup.sent_bytes)
    return 2 * pooled + _pooled_here(lookup)


def _received_bytes(lookup: Lookup, rank: int, here: Sequence[Table], batch: int) -> float:
    """Returns ids and offsets of a rank's shards, which are of the tables `here`; with a second lookup of rows
    also these, and all embeddings that were looked up, which are saved for the decay."""
    placement = lookup.placement
    ids = placement.id_bytes_per_rank[rank]
    if not (lookup.repeats_rows and here):
        return ids + ID_BYTES * len(here) * batch
    distinct = [min(table.rows, table.mean_ids * batch) for table in here]
    bags = batch + max(distinct)
    columns = placement.all_to_all_bytes_per_rank[rank] / lookup.sent_bytes / batch
    return ids + ID_BYTES * (sum(distinct) + len(here) * bags) + FP32_BYTES * bags * columns


def _pooled_here(lookup: Lookup) -> int:
    """Returns the embeddings of this rank's examples from all shards, in fp32."""
    sized = zip(lookup.tables, lookup.dims, strict=True)
    columns = sum(dim for table, dim in sized if table.name not in lookup.placement.replicated)
    return FP32_BYTES * lookup.examples * columns


def _sparse_bytes(lookup: Lookup) -> dict[tuple[int, bool], float]:
    """Returns the gradients of replicated tables as backward makes them, a row and its number for each id, by
    length of embeddings and whether tables are multi-hot."""
    named, found = set(lookup.placement.replicated), dict[tuple[int, bool], float]()
    for table, dim in zip(lookup.tables, lookup.dims, strict=True):
        if table.name in named:
            size = lookup.examples * table.mean_ids * (FP32_BYTES * dim + ID_BYTES)
            found[dim, table.multi_hot] = found.get((dim, table.multi_hot), 0.0) + size
    return found


def _joined_bytes(sparse: dict[tuple[int, bool], float]) -> Iterator[float]:
    """Yields the copies in which the gradients of both kinds of tables in one matrix are joined."""
    for dim, multi_hot in sparse:
        if multi_hot and (dim, False) in sparse:
            yield sparse[dim, True] + sparse[dim, False]


def _on_their_way(lookup: Lookup) -> Iterator[int]:
    """Yields, moment by moment, what TorchRec holds of gradients of pooled embeddings: joined over tables, a copy
    for each rank, these in one tensor; then what is sent and what arrives, which becomes fp32 again."""
    here = _pooled_here(lookup)
    arrived = round(max(lookup.placement.all_to_all_bytes_per_rank))
    yield 3 * here
    if lookup.sent_bytes == FP32_BYTES:
        yield 2 * here + arrived
        return
    yield here + here * lookup.sent_bytes // FP32_BYTES + arrived
    yield arrived + arrived * FP32_BYTES // lookup.sent_bytes
