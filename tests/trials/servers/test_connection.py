"""A worker's connection to a server whose place another takes before the worker hears that it is gone.

The first server keeps its end open and says nothing more, as it looks to a worker where gloo misses that the other
end is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from trials.training.servers.connection import LOOK_SECONDS, Calls, Connection, WaitingThread
from trials.training.servers.messages import Message, Op, ServerLink

TIMEOUT_SECONDS = 120
LARGE = torch.zeros(32 << 20, dtype=torch.uint8)
"""More than sockets keep for one who does not read."""


def greeted(store: Any, restarts: int) -> ServerLink:
    """A server's end of the first call that it gets, after it was started anew so many times."""
    calls = Calls(store, 0, restarts)
    while not (names := list(calls.new())):
        time.sleep(LOOK_SECONDS)
    link = ServerLink(store, names[0], server=True)
    assert link.receive().op == Op.HELLO
    link.send(Message(Op.HELLO, -1))
    return link


def send_large(connection: Connection) -> Message:
    connection.send(Message(Op.PUSH, 7, tensors=(LARGE,)), to_another=Message(Op.PUSH, 7))
    connection.send(Message(Op.DRAIN))
    return connection.receive()


def ask(connection: Connection) -> Message:
    connection.send(Message(Op.PUSH, 7))
    return connection.receive()


@pytest.mark.parametrize("say", [send_large, ask])
def test_one_who_waits_for_a_server_that_is_gone_goes_on_with_its_successor(
    say: Callable[[Connection], Message],
) -> None:
    store, first, heard = HashStore(), list[ServerLink](), list[int]()

    def serve() -> None:
        first.append(greeted(store, 0))
        time.sleep(0.2)
        second = greeted(store, 1)
        heard.append(second.receive().step)
        if say is send_large:
            assert second.receive().op == Op.DRAIN
        second.send(Message(Op.DRAIN, 1))

    server = WaitingThread().submit(serve)
    connection = Connection(store, 0, 0, comes_back=True, while_waiting=lambda: connection.greet_successor())
    answer = WaitingThread().submit(partial(say, connection)).result(timeout=TIMEOUT_SECONDS)
    server.result(timeout=TIMEOUT_SECONDS)
    assert (answer.op, answer.step, heard, connection.restarts) == (Op.DRAIN, 1, [7], 1)
