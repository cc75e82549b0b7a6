"""How a worker reaches a server that may be killed and come back: it calls, and the server that is there answers.

A server that is started anew takes over what it last saved, and says that it is ready under the number of its
restarts. A worker whose link is broken waits for that, calls it, says how far it is, and asks once more what was
not answered. If servers do not come back (`TablesConfig.servers_return`) a broken link is an error.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from trials.training.servers.messages import MEETING, LinkBrokenError, Message, Op, ServerLink

Said = TypeVar("Said")
LOG = logging.getLogger(__name__)
LOOK_SECONDS = 0.02
"""Seconds between two looks at the store for a call, or for a server that is ready."""
SUCCESSOR_SECONDS = 0.5
"""Seconds between two looks for a server that has taken the place of another."""
UNFINISHED_CALLS = 8
"""Number of workers that may be killed while they call, and leave a gap in the numbers of calls."""


class _AnotherCalledError(Exception):
    """Another server has taken the place of the one that was waited for, and was called."""


class Connection:
    """A worker's connection to one server; one thread uses it at a time."""

    def __init__(
        self,
        store: Any,
        worker: int,
        server: int,
        *,
        comes_back: bool,
        while_waiting: Callable[[], None],
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Waits for the server, and calls it.

        Args:
            store: where both sides meet.
            worker: number of this worker.
            server: number of the server.
            comes_back: whether a server that is killed is started anew.
            while_waiting: called again and again while an answer is waited for, if servers come back; greets
                the successors of all servers.
            watch: called again and again while the server is waited for, if nobody else watches its process and
                ends this one; raises `LinkBrokenError` if it is gone.
        """
        self._store, self._worker, self._server, self._comes_back = store, worker, server, comes_back
        self._while_waiting, self._watch = while_waiting, watch
        self.restarts = 0
        """Number of times that the server was started anew."""
        self.pushed = 0
        """Number of steps whose updates were pushed."""
        self.handed_out, self.holds_batch = 0, False
        """Number of batches that were handed out to all, as far as this worker knows, and whether it has the last
        one that it was told of."""
        self.lost_steps = 0
        """Number of steps whose updates of the server's rows were lost, as it came back from what it had saved."""
        self._asked, self._asked_after = Message(Op.HELLO), 0
        self._waiting = WaitingThread()
        self._link = self._called()

    def send(self, message: Message, *, to_another: Message | None = None) -> None:
        """Sends a message; `to_another` in its place to a server that has come back meanwhile.

        Raises:
            LinkBrokenError: if the server is gone, and does not come back.
        """
        self._asked = message
        while True:
            try:
                self._watched(partial(self._link.send, self._asked))
                self._asked_after = self.restarts
                return
            except LinkBrokenError as error:
                self._wait_for_another(error)
            except _AnotherCalledError:
                LOG.info("server %d is told again what its predecessor may not have heard", self._server)
            self._asked = to_another or message

    def receive(self) -> Message:
        """Returns the answer to what was sent last; a server that has come back is asked again.

        Raises:
            LinkBrokenError: if the server is gone, and does not come back.
        """
        while True:
            if self._asked_after != self.restarts:
                self.send(self._asked)
            with contextlib.suppress(_AnotherCalledError):
                try:
                    return self._watched(self._link.receive)
                except LinkBrokenError as error:
                    self._wait_for_another(error)

    def _watched(self, call: Callable[[], Said]) -> Said:
        """Returns what a call says that waits for the server.

        Gloo may miss that the other end is gone, if it goes just when this one begins to wait, be it until a
        message is taken or until one comes. The thread that waits for it is left behind then.

        Raises:
            LinkBrokenError: if the server is gone.
            _AnotherCalledError: if another has taken its place, and was called.
        """
        if not self._comes_back and self._watch is None:
            return call()
        restarts, said = self.restarts, self._waiting.submit(call)
        while True:
            try:
                return said.result(timeout=SUCCESSOR_SECONDS)
            except TimeoutError:
                self._look_at_process()
                if self._comes_back:
                    self._while_waiting()
                if self.restarts != restarts:
                    raise _AnotherCalledError from None

    def greet_successor(self) -> None:
        """Calls a server that has taken the place of this one: others may wait there to hear what this worker has
        pushed."""
        if self._store.check([_ready(self._server, self.restarts + 1)]):
            self._wait_for_another(LinkBrokenError("another one has taken its place"))

    def _wait_for_another(self, error: LinkBrokenError) -> None:
        if not self._comes_back:
            raise error
        LOG.warning("server %d is gone, and is waited for: %s", self._server, error)
        self.restarts += 1
        self._waiting = WaitingThread()  # the one before may wait for good
        self._link = self._called()
        LOG.info("server %d has come back", self._server)

    def _called(self) -> ServerLink:
        """Returns a link to the newest server under this number, which both have said hello through."""
        while True:
            self._look_at_process()
            while not self._store.check([_ready(self._server, self.restarts)]):
                self._look_at_process()
                time.sleep(LOOK_SECONDS)
            while self._store.check([_ready(self._server, self.restarts + 1)]):
                self.restarts += 1
            call = self._store.add(f"{_place(self._server, self.restarts)}.calls", 1)
            name = _call(self._server, self.restarts, call)
            self._store.set(name, "")
            try:
                link = ServerLink(self._store, name, server=False)
                known = torch.tensor([self.handed_out, int(self.holds_batch)])
                hello = Message(Op.HELLO, self.pushed, self._worker, (known,))
                greeted = self._waiting.submit(partial(_greeted, link, hello))
                answer = greeted.result(timeout=MEETING.total_seconds())
            except (LinkBrokenError, TimeoutError) as error:
                # of one that is gone for good whoever watches the processes knows
                LOG.warning("server %d does not answer, and is called again: %s", self._server, error)
                self._waiting = WaitingThread()
                continue
            if answer.step >= 0:
                self.lost_steps += max(0, max(self.pushed, self.handed_out) - answer.step)
            return link

    def _look_at_process(self) -> None:
        if self._watch is not None:
            self._watch()


class WaitingThread:
    """A thread that waits for a server; a process that ends does not wait for it, as for those of a
    `ThreadPoolExecutor`."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._calls = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        threading.Thread(target=self._run, daemon=True, name="waits for a server").start()

    def submit(self, call: Callable[[], Said]) -> Future[Said]:
        """Has the thread make a call, after those that it was given before."""
        future = Future[Said]()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class Calls:
    """The calls of workers to one server."""

    def __init__(self, store: Any, server: int, restarts: int) -> None:
        """Says that the server is ready."""
        self._store, self._server, self._restarts = store, server, restarts
        for earlier in range(restarts + 1):  # one of them may have been killed before it was ready
            store.set(_ready(server, earlier), "")
        self._first, self._taken = 1, set[int]()

    def new(self) -> Iterator[str]:
        """Yields the names of links that workers wait at."""
        for number in range(self._first, self._first + UNFINISHED_CALLS + 1):
            name = _call(self._server, self._restarts, number)
            if number not in self._taken and self._store.check([name]):
                self._taken.add(number)
                yield name
        while self._first in self._taken or (
            self._taken and max(self._taken) - self._first >= UNFINISHED_CALLS
        ):
            self._taken.discard(self._first)
            self._first += 1


def _greeted(link: ServerLink, hello: Message) -> Message:
    """Returns the answer to a hello."""
    link.send(hello)
    return link.receive()


def _place(server: int, restarts: int) -> str:
    return f"server{server}.restart{restarts}"


def _ready(server: int, restarts: int) -> str:
    return f"{_place(server, restarts)}.ready"


def _call(server: int, restarts: int, number: int) -> str:
    return f"{_place(server, restarts)}.call{number}"
