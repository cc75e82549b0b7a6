"""Which rows of which tables each of several servers has, and what a row's number is there.

Row r of a matrix is server r % N's, as its row r // N, so that tables of any size are spread evenly. Rows of
growing tables are given to keys by the server that has them; which server a key is of, its hash says.

Shapes: R rows of a matrix, N servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dhen.errors import UserError
from dhen.inputs.features import EmbeddingTables
from dhen.inputs.growing import GrowingRows
from dhen.schema import FeatureSchema

_SPREAD = 0x5851F42D4C957F2D
"""An odd constant (Knuth's, of MMIX) by which keys are multiplied: the bits that are looked at are not those by
which an index or a sketch finds a key's place."""


def server_of_keys(key_N: Tensor, servers: int) -> Tensor:
    """Returns the server of each key."""
    return ((key_N * _SPREAD) >> 32).remainder(servers)


@dataclass(frozen=True, slots=True)
class Share:
    """One of several servers of rows."""

    server: int
    servers: int

    def count(self, rows: int) -> int:
        """Returns how many of so many rows are the server's."""
        return len(range(self.server, rows, self.servers))

    def part(self, whole_RX: Tensor) -> Tensor:
        """Returns a copy of the server's rows of a whole matrix, or of its vector."""
        return whole_RX[self.server :: self.servers].clone()

    def put(self, part_RX: Tensor, whole_RX: Tensor) -> None:
        """Writes the server's rows into a whole matrix."""
        whole_RX[self.server :: self.servers] = part_RX

    def own_keys(self, key_N: Tensor) -> Tensor:
        """Returns which keys are the server's, as a mask."""
        return server_of_keys(key_N, self.servers) == self.server


@dataclass(frozen=True, slots=True)
class GrowingShare:
    """Rows of one growing table that a server has: `first`, `first` + N, ... as the table counts them, `count` of
    them, which follow one another in the server's part of the matrix from its row `place` on."""

    matrix: str
    """Name of the matrix that the table lies in."""
    start: int
    """Row of the matrix that the table begins at."""
    first: int
    count: int
    place: int


def growing_shares(
    matrices: dict[str, EmbeddingTables], rows: GrowingRows, share: Share
) -> list[GrowingShare]:
    """Returns the server's share of each growing table, in the order of `rows`.

    Raises:
        UserError: where a table has fewer rows than there are servers.
    """
    starts = {
        table.name: (name, start)
        for name, matrix in matrices.items()
        for table, start in zip(matrix.tables, matrix.starts, strict=False)
    }
    found = []
    for table in rows.tables:
        name, start = starts[table.name]
        first = 1 + (share.server - start - 1) % share.servers  # row 0 is the default row, which no key has
        count = len(range(first, table.rows, share.servers))
        if not count:
            raise UserError(
                f"table {table.name!r} has room for {table.rows - 1} id(s), fewer than one for each of "
                f"{share.servers} servers; give servers={table.rows - 1} at most, or the table more capacity."
            )
        found.append(GrowingShare(name, start, first, count, (start + first) // share.servers))
    return found


def schema_of_shares(
    schema: FeatureSchema, rows: GrowingRows, shares: Sequence[GrowingShare], turns: int
) -> FeatureSchema:
    """Returns a log's inputs with the growing tables as large as a server's share of them.

    `turns` is how many times per training step the server is told of keys: a ttl in steps is as many times as
    long.
    """
    counts = {table.name: share.count for table, share in zip(rows.tables, shares, strict=True)}
    tables = []
    for table in schema.tables:
        if table.growing is not None:
            ttl = table.growing.ttl
            ttl = ttl * turns if isinstance(ttl, int) else ttl
            growing = table.growing.replace(capacity=counts[table.name], ttl=ttl)
            table = table.replace(growing=growing, rows=counts[table.name] + 1)
        tables.append(table)
    return schema.replace(tables=tuple(tables))


def numbers_of(whole: GrowingRows, own: GrowingRows, shares: Sequence[GrowingShare], share: Share) -> Tensor:
    """Returns int64 (1 + own rows): of each growing row on the server the number that it has among those of all
    servers; 0 is any default row in both."""
    number_R = torch.zeros(1 + own.starts[-1], dtype=torch.int64)
    for start, whole_start, its in zip(own.starts, whole.starts, shares, strict=False):
        at = torch.arange(its.count)
        number_R[1 + start + at] = whole_start + its.first + at * share.servers
    return number_R
