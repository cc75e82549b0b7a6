"""What the hosts of a study say to each other: JSON messages over one TCP connection a host, no pickles.

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
"""The environment's name for it."""
SILENCE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
"""A host that answers nothing for ten seconds, not even its kernel, is gone (seconds, seconds, times, ms)."""
CONNECT_SECONDS = 5.0
LONGEST_MESSAGE_BYTES = 2**26


class Hello(Value):
    """A host would like to join."""

    say: Literal["hello"] = "hello"
    host: int
    name: str
    """Of the machine."""
    versions: dict[str, str]
    devices: int | None
    """CUDA devices; None for a machine that trains on its CPU."""


class Welcome(Value):
    """It may, if it finds the log there."""

    say: Literal["welcome"] = "welcome"
    log_directory: str
    log: str
    """Fingerprint of the prepared log."""
    directory: str
    """The run's directory on the first host."""
    mark: str
    """Of a file in it: who can read that shares the directory."""


class Refused(Value):
    """One of the two cannot work with the other."""

    say: Literal["refused"] = "refused"
    reason: str


class Ready(Value):
    """It has the log."""

    say: Literal["ready"] = "ready"
    shares_directory: bool


class Start(Value):
    """Its ranks of a task are to start."""

    say: Literal["start"] = "start"
    run: int
    task: dict[str, Any]
    folder: str
    """The trial's, on the first host."""


class ShowStacks(Value):
    """Its ranks of a run are to write their stacks into their logs."""

    say: Literal["show_stacks"] = "show_stacks"
    run: int


class Kill(Value):
    """Its ranks of a run are to end at once."""

    say: Literal["kill"] = "kill"
    run: int


class RankEnded(Value):
    """One of its ranks is gone."""

    say: Literal["rank_ended"] = "rank_ended"
    run: int
    rank: int
    exitcode: int
    killed: str | None
    """It was told to: the state that the rank was in."""
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
"""What reading or writing raises once the other side is gone; `UserError` where it says what nobody can read."""


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
        """For `multiprocessing.connection.wait`: ready once there is something to read, or nobody any more."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Raises one of `GONE` where nobody is there."""
        self._connection.send_bytes(message.model_dump_json().encode())

    @property
    def ready(self) -> bool:
        """Whether `receive` returns at once."""
        return self._connection.poll(0)

    def receive(self) -> Message:
        """The next message, waited for.

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
        """The other side reads the end; this side too."""
        with socket.socket(fileno=os.dup(self.sentinel)) as same:
            same.shutdown(socket.SHUT_RDWR)

    def challenge(self) -> None:
        """The first host's part in finding out that both have the same secret.

        Raises:
            EOFError, OSError: where nobody is there any more.
            UserError: they have not.
        """
        with _same_secret():
            deliver_challenge(self._connection, _secret())
            answer_challenge(self._connection, _secret())

    def answer(self) -> None:
        """The other's part."""
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
    """A socket that waits for hosts at this address, and at no other of this machine.

    Raises:
        UserError: where it is none of this machine's, or taken.
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
    """A connection to the first host.

    Raises:
        ConnectionError, TimeoutError: where nobody waits there (yet).
        UserError: where there can be no such host.
    """
    try:
        return Wire(socket.create_connection(host_and_port(address), timeout=CONNECT_SECONDS))
    except socket.gaierror as error:
        raise UserError(f"{address}: no such host ({error.strerror}).") from None
