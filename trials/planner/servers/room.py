"""How many servers a model's embedding tables need, and what they take of a host's memory.

Servers are spread over the hosts of the ranks in turn (`trials.processes.task`), so a host has its share of them
beside its own ranks. In memory a server has its rows with their sums; on an SSD the rows are in a file, and what
is known of each row stays in memory. More than one server on a host brings no room.
"""

from __future__ import annotations

from typing import NamedTuple

from dhen.memory.tape import FP32_BYTES
from dhen.schema import Growing, Table
from trials.optim.adamw import MOMENTS
from trials.planner.servers.served import Served
from trials.strategy import ServerLevel

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
"""Bytes of a growing row where a time to live is given as time."""
PLACE_BYTES, PLACES = 16, 4
"""Bytes of a place of the index of keys (a key and a row), and places for each key, before they are rounded up to
a power of two (`dhen.inputs.key_index`)."""
COUNTERS = 2 * 8
"""Counters, of a byte each, for each row whose keys wait to be admitted, before they are rounded up likewise
(`trials.embeddings.admission_filter`)."""
DENSE_BYTES = (2 + len(MOMENTS)) * FP32_BYTES
"""Bytes of a dense weight on servers that have the dense part too: itself, its gradient, AdamW's moments."""


class Kept(NamedTuple):
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
        """Returns the fewest servers with which a host has so much room; None where all hosts together have
        none. One server per host is most that matters."""
        fitting = (servers for servers in range(1, hosts + 1) if self.of_host(servers, level, hosts) <= room)
        return next(fitting, None)


def kept(served: Served, *, decays: bool, dense_numbers: int) -> Kept:
    """Returns what servers have of a model's tables.

    Args:
        served: the tables.
        decays: whether `training.table_decay` is above 0.
        dense_numbers: dense weights that servers have too; 0 where ranks do.
    """
    rows = sum(table.rows for table in served.tables)
    rules = [(table, table.growing) for table in served.tables if table.growing is not None]
    beside = rows * (DECAY_BYTES * decays + GIVEN_BYTES * bool(rules)) + DENSE_BYTES * dense_numbers
    return Kept(served.row_bytes, beside + sum(_growing_bytes(table, rule) for table, rule in rules))


def _growing_bytes(table: Table, rule: Growing) -> int:
    """Returns what is known of a growing table's rows on all servers."""
    timed = TIME_BYTES if rule.ttl_milliseconds is not None else 0
    index = PLACE_BYTES * _power_of_two(PLACES * table.rows)
    waits = rule.admit_after > 1 or rule.evict == "lfu"
    return table.rows * (KEY_BYTES + timed) + index + (_power_of_two(COUNTERS * table.rows) if waits else 0)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
