"""The seconds in which ranks pull rows from servers and push gradients, and what of it hides behind compute.

A rank asks all servers at once and waits for the slowest. Rows cross the network between hosts: through the
cards of the rank's own, as fast as one rank's link, and through those of the fullest host of servers, which
all ranks share. A server answers one rank at a time, so its lookups and updates of all ranks' rows add up.
Every message costs a moment, two for each request and for each answer, however small.

Sync: a step's gradients are added up by row and applied once, and the next pull waits for it. Semi: with a
staleness of one or more the next batch's rows are pulled, and the last one's gradients pushed, while a step
computes; with none the pull waits for all updates; with a delay that repeats to the bit for itself alone.
Async: ranks do not wait for each other, but have all dense weights come after each step, for which they wait.

Unverified: seconds a row are from one busy machine (docs/benchmarks/servers-predicted.md). Left out: what
servers take of the CPUs that ranks compute with, and ranks that are slower than others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dhen.schema import Table
from dhen.tape import FP32_BYTES
from trials.cluster.cluster import Cluster, Link
from trials.optim.adamw import MOMENTS
from trials.planner.collectives import HOST_MEMORY_BANDWIDTH, NETWORK_SHARE
from trials.planner.table_memory import hits_of, stretches
from trials.records.job import TablesConfig
from trials.records.strategy import ServerLevel, Strategy

# Embedding tables on servers: the rows that ranks pull for a step, and the bytes that are held and sent of them.
#
# A rank pulls each row that its examples look up once, however often it occurs, and pushes its gradient. How
# many these are follows from how unevenly ids occur (`trials.planner.table_memory`): counted ones as they were
# counted, others by Zipf's law with exponent 1.
#
# Shapes: S stretches of rows that occur about equally often.

NUMBER_BYTES = 8
"""Bytes of a row's number."""
SUM_BYTES = 4
"""Bytes of row-wise Adagrad's sum of a row."""


class ServedTables(NamedTuple):
    """The tables of a model on servers, for ranks that look so many examples up in a step."""

    tables: tuple[Table, ...]
    dims: tuple[int, ...]
    examples: int
    """Examples of a rank in a step."""
    weight_bytes: int
    """Bytes of a weight, as servers store it."""
    sent_bytes: int
    """Bytes of a weight or gradient on its way."""

    def rows(self) -> list[float]:
        """Returns the different rows of each table that a rank's examples look up, as is to be expected."""
        found = []
        for table in self.tables:
            row_S, mean_S = stretches(table)
            ids_S = self.examples * mean_S
            again = float((row_S * -np.expm1(-ids_S / row_S)).sum())
            # first lookups, each of a row of its own
            first = max(0.0, self.examples * table.mean_ids - float(ids_S.sum()))
            found.append(min(table.rows, again + first))
        return found

    @property
    def rows_pulled(self) -> float:
        """Rows that a rank pulls in a step."""
        return sum(self.rows())

    @property
    def growing_rows(self) -> float:
        """Rows of growing tables among them, which are asked for by their keys first."""
        named = zip(self.tables, self.rows(), strict=True)
        return sum(rows for table, rows in named if table.growing is not None)

    @property
    def numbers_pulled(self) -> float:
        """Weights in these rows."""
        return sum(rows * dim for rows, dim in zip(self.rows(), self.dims, strict=True))

    @property
    def ids(self) -> float:
        """Ids that a rank looks up in a step, each as often as it occurs."""
        return self.examples * sum(table.mean_ids for table in self.tables)

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that a rank has from the lookup to the end of the step, with their numbers."""
        return math.ceil(FP32_BYTES * self.numbers_pulled + NUMBER_BYTES * self.rows_pulled)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of these rows' gradients."""
        return math.ceil(FP32_BYTES * self.numbers_pulled)

    @property
    def pulled_bytes(self) -> float:
        """Bytes of rows that a rank gets in a step; it has sent their numbers."""
        return self.sent_bytes * self.numbers_pulled

    @property
    def pushed_bytes(self) -> float:
        """Bytes that a rank sends in a step: gradients with the numbers of their rows."""
        return self.sent_bytes * self.numbers_pulled + NUMBER_BYTES * self.rows_pulled

    @property
    def lookup_bytes(self) -> float:
        """Bytes that go through a rank's memory as it looks embeddings up in rows pulled, and sums gradients up
        by row: either is read and written."""
        width = sum(table.mean_ids * dim for table, dim in zip(self.tables, self.dims, strict=True))
        return 2 * 2 * FP32_BYTES * width * self.examples

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows on all servers together, with row-wise Adagrad's sums."""
        sizes = zip(self.tables, self.dims, strict=True)
        return sum(table.rows * (self.weight_bytes * dim + SUM_BYTES) for table, dim in sizes)


# How many servers a model's embedding tables need, and what they take of a host's memory.
#
# Servers are spread over the hosts of the ranks in turn (`trials.records.task`), so a host has its share of them
# beside its own ranks. In memory a server has its rows with their sums; on an SSD the rows are in a file, and
# what is known of each row stays in memory. More than one server on a host brings no room.

LEFT_TO_SYSTEM = 0.05
"""Share of a host's memory that is left to the system, to pages that are written, and to processes themselves: an
assumption."""
DECAY_BYTES = 8
"""Bytes of a row by which `training.table_decay` knows what it has missed."""
GIVEN_BYTES = 8
"""Bytes of every row of a model with growing tables: when it was given to a key last."""
KEY_BYTES = 8 + 8 + 4 + 8 + 8
"""Bytes of a growing row beside these: its key, its number among those of all servers, how often it occurred, when
it was seen last, and its place in the list of free rows."""
TIME_BYTES = 8
"""Bytes of a growing row if a time to live is given as time."""
PLACE_BYTES, PLACES = 16, 4
"""Bytes of a place of the index of keys (a key and a row), and places for each key, before they are rounded up to
a power of two (`dhen.inputs.growing`)."""
COUNTERS = 2 * 8
"""Counters, of a byte each, for each row whose keys wait to be admitted, before they are rounded up likewise
(`trials.training.embeddings.growing`)."""
DENSE_BYTES = (2 + len(MOMENTS)) * FP32_BYTES
"""Bytes of a dense weight on servers that have the dense part too: itself, its gradient, AdamW's moments."""


class ServerBytes(NamedTuple):
    """All that servers have, whatever their number, in bytes."""

    rows: int
    """Rows with their sums: in memory, or on the SSD."""
    beside: int
    """What is known of each row, and dense weights: in memory in any case."""

    def of_server(self, servers: int, level: ServerLevel) -> int:
        """Returns what each of so many servers takes of its host's memory."""
        return -(-(self.beside + (self.rows if level == "memory" else 0)) // servers)

    def of_host(self, servers: int, level: ServerLevel, hosts: int) -> int:
        """Returns what the servers on the fullest host take of its memory."""
        return -(-servers // hosts) * self.of_server(servers, level)

    def fewest(self, level: ServerLevel, hosts: int, room: int) -> int | None:
        """Returns the fewest servers with which a host has so much room; None if all hosts together have
        none. One server per host is most that matters."""
        fitting = (servers for servers in range(1, hosts + 1) if self.of_host(servers, level, hosts) <= room)
        return next(fitting, None)


def kept(served: ServedTables, *, decays: bool, dense_numbers: int) -> ServerBytes:
    """Returns what servers have of a model's tables.

    Args:
        served: the tables.
        decays: whether `training.table_decay` is above 0.
        dense_numbers: dense weights that servers have too; 0 if ranks do.
    """
    rows = sum(table.rows for table in served.tables)
    rules = [(table, table.growing) for table in served.tables if table.growing is not None]
    beside = rows * (DECAY_BYTES * decays + GIVEN_BYTES * bool(rules)) + DENSE_BYTES * dense_numbers
    for table, rule in rules:
        timed = TIME_BYTES if rule.ttl_milliseconds is not None else 0
        beside += table.rows * (KEY_BYTES + timed) + PLACE_BYTES * _power_of_two(PLACES * table.rows)
        if rule.admit_after > 1 or rule.evict == "lfu":  # keys wait to be admitted
            beside += _power_of_two(COUNTERS * table.rows)
    return ServerBytes(served.row_bytes, beside)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


MESSAGE_SECONDS = 50e-6
"""Seconds of a message through gloo beside its bytes and the network's latency, as a step of its collectives: an
assumption (`trials.cluster.this_machine`)."""
MESSAGES = 2
"""Messages of a request or an answer: a header, and all tensors."""
READ_ROW_SECONDS, UPDATE_ROW_SECONDS, MERGE_ROW_SECONDS = 20e-9, 200e-9, 100e-9
"""Seconds in which a server finds a row, updates it, and adds a rank's gradient to another's, beside bytes."""
READ_COPIES, UPDATE_COPIES, MERGE_COPIES = 4, 12, 6
"""Times that a row's bytes go through memory in these, and that a rank's copies of it do while it is unpacked."""
CORE_BANDWIDTH = 4e9
"""Bytes/s at which one core of a server goes through rows that lie apart."""
ID_SECONDS = 20e-9
"""Seconds of an id on a rank, whose rows are found to be asked for once each."""
COLD_ROW_SECONDS = 69e-6
"""Seconds in which a row is read from a file on an SSD whose page is not in memory: the middle of 33e-6 to 105e-6
(docs/benchmarks/table-levels.md)."""
PAGE_BYTES = 4096
"""Bytes of a page, which a row that is read brings into memory."""
ADAMW_COPIES = 3 + 2 * len(MOMENTS)
"""Times that a dense weight's bytes go through memory if a server updates it."""


class ServersTime(NamedTuple):
    """Seconds of a step that servers are about."""

    pull: float
    push: float
    hidden: float
    """Seconds of these that go on while the rank computes."""
    waits: float = 0.0
    """Seconds in which a rank waits as servers answer others first (async)."""

    @property
    def total(self) -> float:
        """All seconds, those that are hidden too."""
        return self.pull + self.push + self.waits


def servers_time(
    served: ServedTables,
    kept: ServerBytes,
    cluster: Cluster,
    strategy: Strategy,
    tables: TablesConfig,
    *,
    dense_numbers: int,
    rest: float,
) -> ServersTime:
    """Returns the seconds of pulls and pushes in a step.

    Args:
        served: the tables.
        kept: all that servers have.
        cluster: it has servers, and the ranks that ask them.
        strategy: its servers.
        tables: what waits for what.
        dense_numbers: dense weights that are pulled and pushed too; 0 if ranks have them.
        rest: seconds of the step without what servers are about.
    """
    ranks, servers = cluster.ranks, strategy.servers
    link, alone = link_of(cluster), tables.synchrony == "async"
    asking = 1 if alone else ranks  # ranks that train together ask at the same moment

    def transfer(size: float) -> float:
        """Returns the seconds in which every rank gets so many bytes from all servers, or sends as many."""
        if cluster.hosts == 1:
            return ranks * size / link.bandwidth
        crossing = size * (cluster.hosts - 1) / cluster.hosts
        on_one = -(-servers // cluster.hosts) / servers  # share of all servers on the fullest host
        through_servers = ranks * crossing * on_one / (cluster.gpus_per_host * link.bandwidth)
        return max(crossing / link.bandwidth, through_servers)

    def update(updated: ServedTables) -> float:
        """Returns the seconds in which each server updates rows."""
        copies = UPDATE_COPIES * (updated.weight_bytes * updated.numbers_pulled) / CORE_BANDWIDTH
        return (UPDATE_ROW_SECONDS * updated.rows_pulled + copies) / servers

    # of a request to every server beside its bytes; of a rank's rows on each server; of its dense weights
    messages = MESSAGES * servers * MESSAGE_SECONDS + link.latency
    rows, numbers = served.rows_pulled, served.numbers_pulled
    read = READ_ROW_SECONDS * rows + READ_COPIES * (served.weight_bytes * numbers) / CORE_BANDWIDTH
    if strategy.server_level == "ssd":
        # a host's memory holds pages of the rows that occur most, one for each row
        room = (1 - LEFT_TO_SYSTEM) * cluster.host_memory_bytes * min(servers, cluster.hosts) - kept.beside
        if room < kept.rows:
            in_memory = hits_of(served.tables).share(int(max(0.0, room) // PAGE_BYTES))
            # an id whose row is not among these is taken to be the batch's only one of it
            cold = min(1.0, (1.0 - in_memory) * served.ids / max(rows, 1e-9))
            read += cold * rows * COLD_ROW_SECONDS
    read /= servers
    merge = (MERGE_ROW_SECONDS * rows + MERGE_COPIES * (FP32_BYTES * numbers) / CORE_BANDWIDTH) / servers
    dense_update = ADAMW_COPIES * FP32_BYTES * dense_numbers / CORE_BANDWIDTH / servers
    # of growing tables key, table and occurrences, and a row in answer
    asked = transfer(NUMBER_BYTES * rows + 4 * NUMBER_BYTES * served.growing_rows)
    unpacking = READ_COPIES * FP32_BYTES * numbers / CORE_BANDWIDTH
    pull = asked + transfer(served.pulled_bytes) + unpacking + ID_SECONDS * served.ids
    pull += 2 * messages * (2 if served.growing_rows else 1) + asking * read
    push = transfer(served.pushed_bytes) + unpacking + messages
    if tables.synchrony == "sync":
        push += update(served._replace(examples=ranks * served.examples)) + ranks * merge
    else:
        push += asking * update(served)
    if dense_numbers:
        pull += 2 * messages + transfer(FP32_BYTES * dense_numbers)
        push += transfer(FP32_BYTES * dense_numbers) + dense_update
    if alone:
        busy = ranks * (read + update(served) + dense_update)
        return ServersTime(pull, push, 0.0, waits=max(0.0, busy - rest - pull - push))
    if tables.pulls_ahead:
        return ServersTime(pull, push, min(rest, pull + push))
    return ServersTime(pull, push, 0.0 if tables.steps_behind == 0 else min(rest, push))


def link_of(cluster: Cluster) -> Link:
    """Returns what joins a rank with servers: the network, or on one host its memory, through which gloo sends."""
    if cluster.hosts > 1 and cluster.network is not None:
        share = 1.0 if cluster.verified else NETWORK_SHARE
        return cluster.network.replace(bandwidth=share * cluster.network.bandwidth)
    if cluster.device == "cpu" and cluster.nvlink is not None:
        return cluster.nvlink
    return Link(bandwidth=HOST_MEMORY_BANDWIDTH / READ_COPIES, latency=0.0)
