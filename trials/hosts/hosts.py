"""The other hosts of a study, as the first one knows them: who has joined, who is missing, and why not.

Each runs `dhen-search join` (`trials.hosts.join`) and keeps one connection to the first host. Guests are greeted
by threads, so that one who says nothing keeps nobody waiting; all else happens in the driver's own thread,
whenever it looks (`Hosts.hear`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from dhen.errors import UserError
from trials.data.cache import PreparedLog
from trials.hosts.here import devices_here, versions_here
from trials.hosts.wire import GONE, Goodbye, Hello, Message, RankEnded, Ready, Refused, Welcome, Wire, listen

LOG = logging.getLogger(__name__)
MARK = ".hosts"
"""Name of a file in the run's directory while hosts may join: what it holds shows a host whether the directory is
shared."""
LOOK_SECONDS = 0.2
Say = Callable[[str], None]
"""A function that shows sentences to people."""


class RemoteEnd(Protocol):
    """What is told of the end of a rank on another host."""

    def ended(self, message: RankEnded) -> None:
        """Notes that the rank is gone, as its host tells."""

    def lost(self, why: str) -> None:
        """Notes that the rank's host is gone."""


class Member:
    """A host that has joined."""

    def __init__(self, wire: Wire, hello: Hello) -> None:
        self.wire, self.hello = wire, hello
        self.ready: Ready | None = None
        """The host's message that it has found the log; None until then."""
        self.why_gone: str | None = None
        self.ranks: dict[tuple[int, int], RemoteEnd] = {}
        """Ranks of the host that live, by run and rank."""

    @property
    def words(self) -> str:
        """Index and name of the host, for sentences."""
        return f"host {self.hello.host} ({self.hello.name})"

    def hear(self) -> None:
        """Takes in all that the host has said; it is gone where it has left, or does not keep to the protocol."""
        try:
            while self.why_gone is None and self.wire.ready:
                self._take(self.wire.receive())
        except GONE:
            self.lose("left the study: its connection is lost")
        except UserError as error:
            self.lose(str(error))

    def _take(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, RankEnded):
            rank = self.ranks.pop((message.run, message.rank), None)
            if rank is not None:
                rank.ended(message)
        elif isinstance(message, Refused):
            self.lose(f"cannot take part: {message.reason}")

    def send(self, message: Message) -> None:
        """Sends a message to the host; where the host is gone, that is noticed here."""
        try:
            self.wire.send(message)
        except OSError:
            self.lose("left the study: its connection is lost")

    def lose(self, why: str) -> None:
        """Gives the host up: it takes part no longer, and neither do its ranks."""
        self.why_gone = self.why_gone or why
        with contextlib.suppress(OSError):
            self.wire.hang_up()
        while self.ranks:
            self.ranks.popitem()[1].lost(f"{self.words} {self.why_gone}")


class Hosts:
    """All hosts of a study but the first."""

    def __init__(self, address: str, count: int, ranks_per_host: int, say: Say) -> None:
        """Waits at `address` from now on; the study has `count` hosts in all.

        Raises:
            UserError: for an address that is none of this machine's, or taken.
        """
        self.address, self._count, self._ranks_per_host, self._say = address, count, ranks_per_host, say
        self._server = listen(address)
        self._guests: SimpleQueue[tuple[Wire, Hello]] = SimpleQueue()
        self._members: dict[int, Member] = {}
        self._asked: list[int] = []
        self._welcome: Welcome | None = None
        self._mark: Path | None = None
        self.run_numbers = itertools.count()
        """Numbers by which hosts tell runs apart."""

    def open(self, log: PreparedLog, directory: Path) -> None:
        """Lets hosts join a study of this log in this directory."""
        self._mark = directory.absolute() / MARK
        self._welcome = Welcome(
            log_directory=str(log.directory.absolute()),
            log=log.fingerprint,
            directory=str(directory.absolute()),
            mark=secrets.token_hex(16),
        )
        self._mark.write_text(self._welcome.mark)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self, reason: str) -> None:
        """Tells all hosts that the study has ended, and why."""
        for member in self._members.values():
            member.send(Goodbye(reason=reason))
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)

    def hear(self) -> None:
        """Takes in what joined hosts have said, which have left, and which would like to join."""
        for host, member in list(self._members.items()):
            was_ready = member.ready
            member.hear()
            if member.why_gone is not None:
                del self._members[host]
                self._tell(f"{member.words} {member.why_gone}", logging.WARNING)
            elif member.ready is not was_ready:
                self._tell(f"{member.words} has joined")
        while not self._guests.empty():
            self._admit(*self._guests.get())

    def members(self) -> dict[int, Member]:
        """Returns the joined hosts that are ready to start ranks."""
        return {host: member for host, member in self._members.items() if member.ready is not None}

    def complete(self) -> bool:
        """Tells whether all hosts are there; says once which are missing."""
        joined = self.members()
        missing = [host for host in range(1, self._count) if host not in joined]
        if missing != self._asked:
            for host in set(missing) - set(self._asked):
                self._tell(f"waiting for host {host}: dhen-search join {self.address} --host {host}")
            self._asked = missing
        return not missing

    def wait_for_all(self) -> None:
        """Waits until all hosts are there."""
        self.hear()
        while not self.complete():
            connection.wait([member.wire.sentinel for member in self._members.values()], LOOK_SECONDS)
            self.hear()

    def _tell(self, sentence: str, level: int = logging.INFO) -> None:
        """Writes a sentence to the terminal and to the driver's log."""
        LOG.log(level, "%s", sentence)
        self._say(sentence)

    def _accept(self) -> None:
        """Accepts connections until the server is closed."""
        while True:
            try:
                connected, peer = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(Wire(connected), peer[0]), daemon=True).start()

    def _greet(self, wire: Wire, peer: str) -> None:
        """Finds out which host has connected."""
        try:
            wire.challenge()
            hello = wire.receive()
        except (*GONE, UserError) as error:
            self._tell(f"turned {peer} away: {error or 'it hung up'}")
            return
        if isinstance(hello, Hello):
            self._guests.put((wire, hello))

    def _admit(self, wire: Wire, hello: Hello) -> None:
        member, reason = Member(wire, hello), self._objection(hello)
        if reason is not None:
            member.send(Refused(reason=reason))
            self._tell(f"turned {member.words} away: {reason}")
            return
        assert self._welcome is not None
        self._members[hello.host] = member
        member.send(self._welcome)

    def _objection(self, hello: Hello) -> str | None:
        """Returns why a host cannot join; None where it can."""
        joined = self._members.get(hello.host)
        if not 0 < hello.host < self._count:
            return (
                f"--host {hello.host}: the study runs on hosts 0 to {self._count - 1}, and 0 is the one that "
                f"runs it; give --host {'1' if self._count == 2 else f'1 to {self._count - 1}'}."
            )
        if joined is not None:
            return (
                f"--host {hello.host}: {joined.words} has joined already; give each host an index of its own."
            )
        for name, version in versions_here().items():
            other_version = hello.versions.get(name)
            if other_version != version:
                return (
                    f"{name} is {other_version} on that host and {version} on the first; "
                    "install the same on all hosts."
                )
        return self._lack_of_devices(hello.devices)

    def _lack_of_devices(self, devices: int | None) -> str | None:
        if (devices is None) != (devices_here() is None):
            return "one of the two hosts has CUDA devices and the other has none; hosts must be alike."
        if devices is not None and devices < self._ranks_per_host:
            return (
                f"it has {devices} CUDA device(s), and each of the {self._ranks_per_host} ranks a host needs one; "
                f"run the study with ranks={self._count}x{devices}, or take a host with more."
            )
        return None
