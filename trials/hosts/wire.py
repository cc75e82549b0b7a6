"""What the hosts of a study say to each other: JSON messages over one TCP connection per host, no pickles.

Framing and the mutual challenge are `multiprocessing.connection`'s; the challenge's key is the secret in
`DHEN_SEARCH_SECRET`, the same on all hosts (docs/decisions/0012-hosts.md). The kernel's keepalive finds hosts that
are gone without a word.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dhen.errors import UserError
from dhen.values import Value
from trials.address import family_of, host_and_port
from trials.events import LastWords

SECRET = "DHEN_SEARCH_SECRET"
"""Name of the environment variable that holds the secret."""
SILENCE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
"""Limits after which a host that answers nothing for ten seconds, not even its kernel, is gone (seconds, seconds,
times, ms)."""
CONNECT_SECONDS = 5.0
LONGEST_MESSAGE_BYTES = 2**26


class Hello(Value):
    """A host would like to join."""

    say: Literal["hello"] = "hello"
    host: int
    name: str
    """Name of the machine."""
    versions: dict[str, str]
    devices: int | None
    """Number of CUDA devices; None for a machine that trains on its CPU."""


class Welcome(Value):
    """The host may join, if it finds the log there."""

    say: Literal["welcome"] = "welcome"
    log_directory: str
    log: str
    """Fingerprint of the prepared log."""
    directory: str
    """The run's directory on the first host."""
    mark: str
    """Content of a file in the run's directory: a host that can read it shares the directory."""


class Refused(Value):
    """One of the two hosts cannot work with the other."""

    say: Literal["refused"] = "refused"
    reason: str


class Ready(Value):
    """The host has the log."""

    say: Literal["ready"] = "ready"
    shares_directory: bool


class Start(Value):
    """The host's ranks of a task are to start."""

    say: Literal["start"] = "start"
    run: int
    task: dict[str, Any]
    folder: str
    """The trial's directory on the first host."""


class ShowStacks(Value):
    """The host's ranks of a run are to write their stacks into their logs."""

    say: Literal["show_stacks"] = "show_stacks"
    run: int


class Kill(Value):
    """The host's ranks of a run are to end at once."""

    say: Literal["kill"] = "kill"
    run: int


class RankEnded(Value):
    """One of the host's ranks is gone."""

    say: Literal["rank_ended"] = "rank_ended"
    run: int
    rank: int
    exitcode: int
    killed: str | None
    """The state that the rank was in when it was killed on the first host's word; None where it ended by
    itself."""
    words: LastWords | None
    log_tail: str


class Goodbye(Value):
    """The study has ended."""

    say: Literal["goodbye"] = "goodbye"
    reason: str


Message = Annotated[
    Hello | Welcome | Refused | Ready | Start | ShowStacks | Kill | RankEnded | Goodbye,
    Field(discriminator="say"),
]
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)

GONE = (EOFError, OSError)
"""Exceptions of reading or writing once the other side is gone; `UserError` stands for messages that cannot be
read."""


class Wire:
    """One end of a connection between two hosts."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes the socket over."""
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in SILENCE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = Connection(connected.detach())

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes: ready once there is something to read, or the other side
        is gone."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Sends a message; raises one of `GONE` where the other side is gone."""
        self._connection.send_bytes(message.model_dump_json().encode())

    @property
    def ready(self) -> bool:
        """Whether `receive` returns at once."""
        return self._connection.poll(0)

    def receive(self) -> Message:
        """Waits for the next message and returns it.

        Raises:
            EOFError, OSError: where nobody is there any more.
            UserError: for what is no message of this version.
        """
        data = self._connection.recv_bytes(LONGEST_MESSAGE_BYTES)
        try:
            return _ADAPTER.validate_json(data)
        except ValidationError:
            raise UserError(
                f"the other host says {data[:40]!r}, which this version does not understand; "
                "install the same version of dhen-search on all hosts."
            ) from None

    def hang_up(self) -> None:
        """Ends the connection: both sides read its end."""
        with socket.socket(fileno=os.dup(self.sentinel)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)

    def challenge(self) -> None:
        """Plays the first host's part in finding out that both have the same secret.

        Raises:
            EOFError, OSError: where nobody is there any more.
            UserError: they have not.
        """
        with _same_secret():
            deliver_challenge(self._connection, _secret())
            answer_challenge(self._connection, _secret())

    def answer(self) -> None:
        """Plays the joining host's part in finding out that both have the same secret."""
        with _same_secret():
            answer_challenge(self._connection, _secret())
            deliver_challenge(self._connection, _secret())


def _secret() -> bytes:
    return os.environ.get(SECRET, "").encode()


@contextmanager
def _same_secret() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise
    except AuthenticationError:
        raise UserError(
            f"the two hosts have not the same secret: set {SECRET} to the same value on all of them, or on none."
        ) from None
    except (AssertionError, OSError):  # multiprocessing asserts what the first message looks like
        raise UserError("who answers there is no host of a dhen-search study.") from None


def listen(address: str) -> socket.socket:
    """Returns a socket that waits for hosts at this address, and at no other of this machine.

    Raises:
        UserError: where the address is none of this machine's, or taken.
    """
    host, port = host_and_port(address)
    if host in ("0.0.0.0", "::", "*"):
        raise UserError(f"address={address}: give the address at which the other hosts reach this machine.")
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=128)
    except OSError as error:
        raise UserError(
            f"address={address}: cannot wait for other hosts there ({error.strerror or error}). Give host:port "
            "with an address of this machine and a free port."
        ) from None


def connect(address: str) -> Wire:
    """Returns a connection to the first host.

    Raises:
        ConnectionError, TimeoutError: where nobody waits there (yet).
        UserError: where there can be no such host.
    """
    try:
        return Wire(socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS))
    except socket.gaierror as error:
        raise UserError(f"{address}: no such host ({error.strerror}).") from None
