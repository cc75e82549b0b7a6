"""What workers and servers of embedding tables say to each other, as tensors over gloo.

A message is a header of fixed size, which says what is asked and which tensors follow, and then all of these
in one buffer. Each pair of a worker and a server has a gloo group of its own, so that one that is gone breaks
no connection but its own. Nothing is unpickled: a header is integers.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.errors import UserError
from dhen.inputs.features import EmbeddingTables
from dhen.inputs.growing import GrowingRows
from dhen.schema import FeatureSchema

HEADER, FIELDS, SHAPE = 128, 6, 4
"""Integers of a header; those before the shapes; those of a shape (type, dimensions, rows, columns)."""
MOST_TENSORS = (HEADER - FIELDS) // SHAPE
ALIGNED = 8
"""Bytes of which the place of each tensor in the buffer is a multiple."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.float64)
VERSION = 3
"""Version of these messages; a worker and a server of different ones do not speak to each other."""
MEETING = datetime.timedelta(seconds=10)
"""Time that one side waits for the other to make the connection, which both are about to do."""
PATIENCE = datetime.timedelta(days=7)
"""Time that one side waits for a message of the other. Who is gone breaks the connection at once; who hangs is
found by who watches the processes."""


class Op(IntEnum):
    """What is asked of a server."""

    HELLO = auto()
    """A worker has connected: its number, steps that it has pushed, batches that were handed out as it knows and
    whether it has the last one -> number of steps after which the server came back, -1 for one that never left."""
    ADMIT = auto()
    """Rows for keys of growing tables, which are counted: key_K, table_K, times_K, newest time stamp -> row_K."""
    FIND = auto()
    """Rows of keys as they are: key_K -> row_K."""
    PULL = auto()
    """Rows for a step, when the synchrony allows it: row_U of each matrix -> weight_UD of each."""
    READ = auto()
    """Rows as they are: as PULL."""
    PUSH = auto()
    """Gradients of a step: settings, row_U and gradient_UD of each matrix, then the dense part's; no answer."""
    DRAIN = auto()
    """Waits until all that this worker has pushed is in the tables."""
    BEGIN_PASS = auto()
    """A pass over the log begins."""
    DENSE = auto()
    """The server's part of the dense weights."""
    NEXT = auto()
    """The number of the batch to train on, of server 0."""
    FULL = auto()
    """Some rows of a matrix one after another, or keys, to copy tables whole."""
    CHANGED = auto()
    """Some rows of a matrix, or keys, that have changed since they were asked for last; for a number below 0 all,
    as they are, count as told: number -> whether there may be more, row_U, weight_UD."""
    EXPORT = auto()
    """Writes the server's part into a folder."""
    IMPORT = auto()
    """Takes the tables over from such a folder."""
    LEAVE = auto()
    """The worker has ended well; no answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer."""

    op: int
    step: int = 0
    number: int = 0
    """What else is said, by the kind of message."""
    tensors: tuple[Tensor, ...] = ()


class LinkBrokenError(ConnectionError):
    """The other end of a connection is gone, or never came."""


class ServerLink:
    """One end of the connection between a worker and a server; one thread uses it at a time."""

    def __init__(self, store: Any, name: str, *, server: bool) -> None:
        """Waits for the other end, which makes a link of the same name at the same time.

        Raises:
            LinkBrokenError: if the other end does not come.
        """
        self._peer = 0 if server else 1
        # of its own: a store that waits for one peer lets nobody else ask it
        pair = dist.PrefixStore(f"{name}.v{VERSION}", store.clone())  # type: ignore[attr-defined]
        with _broken_is_said(name):
            self._group: Any = dist.ProcessGroupGloo(pair, 1 if server else 0, 2, MEETING)
        self._name = name

    def send(self, message: Message) -> None:
        """Sends a message; returns once its buffers may be written to again.

        Raises:
            LinkBrokenError: if the other end is gone.
        """
        tensors = message.tensors
        assert len(tensors) <= MOST_TENSORS
        header = torch.zeros(HEADER, dtype=torch.int64)
        said = [message.op, message.step, message.number, len(tensors)]
        header[: len(said)] = torch.tensor(said)
        for place, tensor in enumerate(tensors):
            shape = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
            start = FIELDS + SHAPE * place
            header[start : start + len(shape)] = torch.tensor(shape)
        with _broken_is_said(self._name):
            self._group.send([header], self._peer, 0).wait(PATIENCE)
            buffer = torch.empty(sum(_room(t.dtype, t.shape) for t in tensors), dtype=torch.uint8)
            if not len(buffer):
                return
            start = 0
            for tensor in tensors:
                given = tensor.detach().contiguous().view(-1).view(torch.uint8)
                buffer[start : start + len(given)] = given
                start += _room(tensor.dtype, tensor.shape)
            self._group.send([buffer], self._peer, 0).wait(PATIENCE)

    def receive(self) -> Message:
        """Returns the next message from the other end.

        Raises:
            LinkBrokenError: if the other end is gone.
        """
        header = torch.empty(HEADER, dtype=torch.int64)
        with _broken_is_said(self._name):
            self._group.recv([header], self._peer, 0).wait(PATIENCE)
        op, step, number, count, *_ = header.tolist()
        shapes = []
        for place in range(count):
            code, dimensions, *sizes = header[FIELDS + SHAPE * place :][:SHAPE].tolist()
            shapes.append((DTYPES[code], tuple(sizes[:dimensions])))
        buffer = torch.empty(sum(_room(dtype, shape) for dtype, shape in shapes), dtype=torch.uint8)
        if len(buffer):
            with _broken_is_said(self._name):
                self._group.recv([buffer], self._peer, 0).wait(PATIENCE)
        tensors, start = [], 0
        for dtype, shape in shapes:
            size = math.prod(shape) * dtype.itemsize
            tensors.append(buffer[start : start + size].view(dtype).view(shape))
            start += _room(dtype, shape)
        return Message(op, step, number, tuple(tensors))


@contextlib.contextmanager
def _broken_is_said(name: str) -> Iterator[None]:
    """Gives gloo's errors, which are all of one kind, a kind of their own."""
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split()).partition(". This is typically")[0]  # what follows is advice
        raise LinkBrokenError(f"{name}: the other end is gone ({said[-160:]})") from error


def _room(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Returns the bytes that a tensor takes in the buffer."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


# Which rows of which tables each of several servers has, and what a row's number is there.
#
# Row r of a matrix is server r % N's, as its row r // N, so that tables of any size are spread evenly. Rows of
# growing tables are given to keys by the server that has them; which server a key is of, its hash says.
#
# Shapes: R rows of a matrix, N servers.

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
        UserError: if a table has fewer rows than there are servers.
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
