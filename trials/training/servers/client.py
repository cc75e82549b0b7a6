"""A worker's side of the servers: requests to all of them at once, in order, from a thread of its own.

What is pushed is on its way while the worker goes on, and so are the next batch's rows if they may be
pulled ahead. One thread has all links, so that each server gets a worker's messages in their order.

Shapes: R rows, U of them that a batch reads, each once, N that have changed, D columns, K keys.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dhen.inputs.features import EmbeddingTables
from dhen.inputs.growing import EMPTY, GrowingRows, KeyIndex
from trials.store.weights import KEYS, Weights, changes, row_changes
from trials.training.embeddings.growing import NO_TIME
from trials.training.servers.connection import SUCCESSOR_SECONDS, Connection
from trials.training.servers.messages import DTYPES, Message, Op, Share, server_of_keys
from trials.training.servers.server import BatchAnswer, BatchGrant, Losses, path_tensor, piece, told_in

ROWS_AT_ONCE = 1 << 18
"""Rows of a matrix that are copied with one message."""


class ServerRows(NamedTuple):
    """Rows of every matrix that one server has, of some."""

    places: tuple[Tensor, ...]
    """Where they are among all, for each matrix."""
    rows: tuple[Tensor, ...]
    """The same rows as the server numbers them."""


class StepRows(NamedTuple):
    """Rows of every matrix that were pulled for a step."""

    rows: tuple[Tensor, ...]
    """row_U of each matrix, in order, each once."""
    of_servers: tuple[ServerRows, ...]
    """What of them each server has."""
    weights: tuple[Tensor, ...]
    """weight_UD of each, in fp32."""
    read_at: tuple[int, ...]
    """How many times each server had given rows to keys."""
    behind: int
    """Largest number of earlier steps whose updates they lack."""
    restarts: tuple[int, ...]
    """How often each server had been started anew."""


class Servers:
    """The servers of a training, as one worker asks them."""

    def __init__(
        self,
        store: Any,
        worker: int,
        workers: int,
        count: int,
        *,
        servers_return: bool = False,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Connects to all servers, and waits until they are ready.

        Args:
            store: where both sides meet.
            worker: number of this worker.
            workers: number of all.
            count: number of servers.
            servers_return: whether servers that are killed come back.
            watch: as `Connection` takes it.
        """
        self.worker, self.workers, self.count = worker, workers, count
        self._links = list[Connection]()
        for server in range(count):
            self._links.append(
                Connection(
                    store,
                    worker,
                    server,
                    comes_back=servers_return,
                    while_waiting=self._greet_successors,
                    watch=watch,
                )
            )
        self._courier = ThreadPoolExecutor(1, "courier")
        self.behind = dict[int, int]()
        """How often a batch of workers on their own was trained on while so many others were handed out."""
        self._lost_batches = 0
        self._over = threading.Event()
        if servers_return:
            threading.Thread(target=self._look_for_successors, daemon=True).start()

    @property
    def restarts(self) -> tuple[int, ...]:
        """How often each server was started anew."""
        return tuple(link.restarts for link in self._links)

    @property
    def lost_steps(self) -> int:
        """Number of steps whose updates were lost: of some rows with a server that came back from what it had
        saved, or of a whole batch with a worker on its own."""
        return self._lost_batches + sum(link.lost_steps for link in self._links)

    def later(self, call: Callable[[], Any]) -> Future[Any]:
        """Has the thread that has the links make a call, after what it was given before."""
        return self._courier.submit(call)

    def now(self, call: Callable[[], Any]) -> Any:
        """Has the thread make a call, and waits for it."""
        return self.later(call).result()

    def pull(self, step: int, rows: Sequence[Tensor], dtype: torch.dtype, *, read: bool = False) -> StepRows:
        """Returns rows of every matrix, for a step or, with `read`, as they are; in the links' thread."""
        split, op = self._split(rows), Op.READ if read else Op.PULL
        answers = self._ask([Message(op, step, DTYPES.index(dtype), its.rows) for its in split])
        weights = []
        for number, row_U in enumerate(rows):
            width = answers[0].tensors[number].shape[1]
            weight_UD = torch.empty(len(row_U), width)
            for its, answer in zip(split, answers, strict=True):
                weight_UD[its.places[number]] = answer.tensors[number].float()
            weights.append(weight_UD)
        behind = max(answer.number for answer in answers)
        read_at = tuple(answer.step for answer in answers)
        return StepRows(tuple(rows), split, tuple(weights), read_at, behind, self.restarts)

    def push(
        self,
        step: int,
        pulled: StepRows,
        gradients: Sequence[Tensor],
        dtype: torch.dtype,
        *,
        rate: float,
        decay: float,
        dense: tuple[Tensor, float] | None = None,
    ) -> None:
        """Sends a step's gradients of the rows that were pulled, and of the dense part with its learning rate; in
        the links' thread. A server that was started anew meanwhile may have given these rows to other keys, and
        gets none."""
        scales = [_scale(gradient_UD) if dtype is torch.float16 else 1.0 for gradient_UD in gradients]
        sent = [(g_UD * scale).to(dtype) for g_UD, scale in zip(gradients, scales, strict=True)]
        flat, dense_rate = dense if dense is not None else (None, 0.0)
        settings = torch.tensor([rate, decay, dense_rate, *scales], dtype=torch.float64)
        for server, (link, its) in enumerate(zip(self._links, pulled.of_servers, strict=True)):
            parts = [gradient_UD[place] for gradient_UD, place in zip(sent, its.places, strict=True)]
            more = [] if flat is None else [flat[piece(len(flat), Share(server, self.count))]]
            message = Message(Op.PUSH, step, pulled.read_at[server], (settings, *its.rows, *parts, *more))
            nothing = [part[:0] for part in (*its.rows, *parts)]
            without_rows = Message(Op.PUSH, step, 0, (settings, *nothing, *more))
            is_another = link.restarts != pulled.restarts[server]
            link.send(without_rows if is_another else message, to_another=without_rows)
            link.pushed = step + 1

    def rows_of_keys(
        self, key_K: Tensor, table_K: Tensor, times_K: Tensor | None, step: int = 0, time: int | None = None
    ) -> Tensor:
        """Returns the rows of keys, each given once; those that occur in a step, with how often, may be given
        rows; in the links' thread."""
        server_K = server_of_keys(key_K, self.count)
        places = [(server_K == server).nonzero().squeeze(1) for server in range(self.count)]
        if times_K is None:
            messages = [Message(Op.FIND, tensors=(key_K[place],)) for place in places]
        else:
            stamp = NO_TIME if time is None else time
            messages = [
                Message(Op.ADMIT, step, stamp, (key_K[place], table_K[place], times_K[place]))
                for place in places
            ]
        row_K = torch.empty_like(key_K)
        for place, answer in zip(places, self._ask(messages), strict=True):
            (row_K[place],) = answer.tensors
        return row_K

    def drain(self, step: int) -> None:
        """Waits until the updates of all steps before this one are in the tables."""
        self._ask_all(Message(Op.DRAIN, step))

    def begin_pass(self) -> None:
        """Tells servers that a pass over the log begins."""
        self._send_all(Message(Op.BEGIN_PASS))

    def dense(self) -> Tensor:
        """Returns all dense weights, in fp32."""
        answers = self._ask_all(Message(Op.DENSE))
        return torch.cat([answer.tensors[0] for answer in answers])

    def next(self, until: int, rate_factor: float, done: Losses) -> BatchGrant:
        """Asks for the next batch, see `trials.training.servers.server`; `done` is of the one before."""
        said = torch.tensor([rate_factor, *done], dtype=torch.float64)

        def ask() -> BatchGrant:
            first, message = self._links[0], Message(Op.NEXT, number=until, tensors=(said,))
            first.send(message)
            told = told_in(first.receive())
            first.holds_batch = told.answer is BatchAnswer.TRAIN
            for link in self._links:
                link.handed_out = told.number + first.holds_batch
            return told

        told: BatchGrant = self.now(ask)
        self.behind, self._lost_batches = told.behind, told.lost
        return told

    def matrix(self, number: int, rows: int, columns: int) -> Tensor:
        """Returns a whole matrix, in fp32."""
        whole_RD = torch.empty(rows, columns)

        def copy_all() -> None:
            for server, link in enumerate(self._links):
                share, first = Share(server, self.count), 0
                own_RD = torch.empty(share.count(rows), columns)
                while first < len(own_RD):
                    span = torch.tensor([first, ROWS_AT_ONCE])
                    link.send(Message(Op.FULL, number=number, tensors=(span,)))
                    (part_RD,) = link.receive().tensors
                    own_RD[first : first + len(part_RD)] = part_RD
                    first += len(part_RD)
                share.put(own_RD, whole_RD)

        self.now(copy_all)
        return whole_RD

    def keys(self, matrices: int, rows: int) -> Tensor:
        """Returns the key of each growing row (1 + R), 0 if it is free."""
        key_R = torch.zeros(rows, dtype=torch.int64)
        for answer in self._ask_all(Message(Op.FULL, number=matrices)):
            row_K, key_K = answer.tensors
            key_R[row_K] = key_K
        return key_R

    def changed(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns row_U of a matrix that have changed since this was asked last, in order, and their weights in
        fp32; for the number behind those of all, growing rows whose keys have changed, and the keys.

        They come in parts, between which the thread that has the links does what else it is given.
        """
        rows, values, more = list[Tensor](), list[Tensor](), True
        while more:
            answers = self._ask_all(Message(Op.CHANGED, number=number))
            for answer in answers:
                row_U, value_U = answer.tensors
                rows.append(row_U)
                values.append(value_U)
            more = any(answer.number for answer in answers)
        row_N, order_N = torch.cat(rows).sort(stable=True)
        is_newest_N = torch.ones_like(row_N, dtype=torch.bool)
        is_newest_N[:-1] = row_N[1:] != row_N[:-1]  # a row that has changed meanwhile comes again
        return row_N[is_newest_N], torch.cat(values)[order_N[is_newest_N]]

    def all_told(self) -> None:
        """Has all rows and keys, as they are, count as asked for."""
        self._ask_all(Message(Op.CHANGED, number=-1))

    def save(self, folder: Path) -> None:
        """Has each server write its part into a folder."""
        self._ask_all(Message(Op.EXPORT, tensors=(path_tensor(folder),)))

    def go_on(self, step: int, folder: Path | None) -> None:
        """Goes on after so many steps; the first worker has servers go on from what they have saved in a folder,
        or as they are."""
        for link in self._links:
            link.pushed = link.handed_out = step
        if self.worker == 0:
            sent = () if folder is None else (path_tensor(folder),)
            self._ask_all(Message(Op.IMPORT, step, tensors=sent))

    def leave(self) -> None:
        """Tells servers that this worker has ended well."""
        self._over.set()
        self._send_all(Message(Op.LEAVE))
        self._courier.shutdown()

    def _look_for_successors(self) -> None:
        """Looks again and again whether servers were started anew, in a thread of its own."""
        while not self._over.wait(SUCCESSOR_SECONDS):
            with contextlib.suppress(RuntimeError):  # this worker has left meanwhile
                self.now(self._greet_successors)

    def _greet_successors(self) -> None:
        """Calls servers that were started anew: what waits there for this worker's hello may be what another waits
        for, whose push or answer this one waits for elsewhere."""
        for link in self._links:
            link.greet_successor()

    def _split(self, rows: Sequence[Tensor]) -> tuple[ServerRows, ...]:
        """Returns which of the rows of every matrix each server has."""
        owners = [row_U.remainder(self.count) for row_U in rows]
        numbers = [row_U.div(self.count, rounding_mode="floor") for row_U in rows]
        split = []
        for server in range(self.count):
            places = tuple((owner_U == server).nonzero().squeeze(1) for owner_U in owners)
            its = tuple(number_U[place] for number_U, place in zip(numbers, places, strict=True))
            split.append(ServerRows(places, its))
        return tuple(split)

    def _send_all(self, message: Message) -> None:
        """Sends all servers a message that has no answer."""
        for link in self._links:
            self.now(partial(link.send, message))

    def _ask_all(self, message: Message) -> list[Message]:
        """Returns the answers of all servers to a message."""
        return self.now(lambda: self._ask([message] * self.count))  # type: ignore[no-any-return]

    def _ask(self, messages: Sequence[Message]) -> list[Message]:
        """Sends each server its message, then waits for all answers; in the links' thread."""
        for link, message in zip(self._links, messages, strict=True):
            link.send(message)
        return [link.receive() for link in self._links]


def _scale(gradient_UD: Tensor) -> float:
    """Returns a power of two by which gradients are multiplied before they are rounded to fp16, in which those
    of a mean over thousands of examples would vanish."""
    largest = float(gradient_UD.abs().max()) if gradient_UD.numel() else 0.0
    return 1.0 if largest == 0.0 else 2.0 ** -torch.tensor(largest).log2().floor().item()


# What a model's tables became since an earlier state, from the rows that servers say have changed.
#
# Servers give rows of growing tables to keys as they see fit, and each as it is numbered among those of all.
# Here a key keeps the row that it has in the earlier state, and new keys get free rows, the first ones first, so
# that the state differs by what was trained alone.
#
# Shapes: R growing rows, K keys that have one, N rows that changed, D columns.


class ChangedWeights:
    """The tables' changes, asked from servers again and again."""

    def __init__(
        self, servers: Servers, tables: Mapping[str, EmbeddingTables], growing: GrowingRows | None
    ) -> None:
        """Notes where growing tables lie.

        Args:
            servers: the servers, which number matrices in this order.
            tables: the tables of each matrix, by its name.
            growing: what is known of growing ones; None if there are none.
        """
        self._servers, self._growing = servers, growing
        self._places = {name: list[tuple[int, int, int]]() for name in tables}
        """Of the growing tables of each matrix: the row of the matrix that is the table's default row, the number
        of growing rows before the table's, and of its rows but for that one."""
        self._key_R: Tensor | None = None
        """The key of each growing row on the servers, as they told last."""
        of_tables = {}
        if growing is not None:
            starts = zip(growing.tables, growing.starts, strict=False)
            of_tables = {table.name: (start, table.rows - 1) for table, start in starts}
        for name, matrix in tables.items():
            for table, in_matrix in zip(matrix.tables, matrix.starts, strict=False):
                if table.name in of_tables:
                    self._places[name].append((in_matrix, *of_tables[table.name]))

    def since(self, before: Mapping[str, Tensor], prefix: str) -> Weights:
        """Returns what tables and keys became, as `trials.store.weights` has it; all updates must have
        been applied.

        Args:
            before: a state of the model, which has all changes that were returned earlier.
            prefix: the beginning of the names of matrices in it.
        """
        found, row_R = Weights(), None
        if self._growing is not None:
            number = len(self._places)  # the keys come behind the matrices
            if self._key_R is None:
                self._key_R = self._servers.keys(number, len(self._growing.keys))
            key_R, (changed_N, key_N) = self._key_R, self._servers.changed(number)
            key_R[changed_N] = key_N
            new_R = torch.where(torch.isin(before[KEYS], key_R), before[KEYS], EMPTY)
            for span in self._growing.spans:
                key_N = key_R[span]
                key_N = key_N[(key_N != EMPTY) & ~torch.isin(key_N, before[KEYS])]
                free = (new_R[span] == EMPTY).nonzero().squeeze(1)[: len(key_N)]
                new_R[span.start + free] = key_N
            index = KeyIndex()
            taken_K = new_R.nonzero().squeeze(1)
            index.add(new_R[taken_K], taken_K)
            row_R = index.find(key_R)
            found |= changes({KEYS: before[KEYS]}, {KEYS: new_R})
        for number, (name, places) in enumerate(self._places.items()):
            row_N, weight_ND = self._servers.changed(number)
            if row_R is not None:
                row_N, weight_ND = _placed(row_N, weight_ND, places, row_R)
            found |= row_changes(f"{prefix}{name}", before[f"{prefix}{name}"], row_N, weight_ND)
        return found


def _placed(
    row_N: Tensor, weight_ND: Tensor, places: list[tuple[int, int, int]], row_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns changed rows of a matrix as the earlier state numbers them, in order, without free ones; `row_R` is
    where it has each growing row of the servers, 0 for free ones."""
    to_N, is_held_N = row_N.clone(), torch.ones_like(row_N, dtype=torch.bool)
    for in_matrix, in_all, rows in places:
        its = ((row_N > in_matrix) & (row_N <= in_matrix + rows)).nonzero().squeeze(1)
        there = row_R[row_N[its] - in_matrix + in_all]
        to_N[its], is_held_N[its] = there - in_all + in_matrix, there != 0
    to_N, order_N = to_N[is_held_N].sort()
    return to_N, weight_ND[is_held_N][order_N]
