"""Who may join a study, and what is said to those who may not: real connections, no ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_hosts import first_host, free_address
from faulty_ranks import real_training

from dhen.errors import UserError
from trials.data.cache import PreparedLog
from trials.hosts.hosts import Hosts
from trials.hosts.join import check_log, join_study
from trials.hosts.wire import SECRET, Ready, listen


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    return PreparedLog.open(Path(real_training(tmp_path_factory.mktemp("log") / "log", 300).log_directory))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def hosts(log: PreparedLog, tmp_path: Path, said: list[str]) -> Iterator[Hosts]:
    first = first_host(log, tmp_path, said)
    yield first
    first.close("the test is over")


@contextmanager
def listening(hosts: Hosts) -> Iterator[None]:
    """The driver looks again and again, as it does while candidates train."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            hosts.hear()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def until(said: list[str], words: str) -> None:
    deadline = time.monotonic() + 10
    while not any(words in each for each in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.01)


def refusal(hosts: Hosts, host: int = 1) -> str:
    with listening(hosts), pytest.raises(UserError) as refused:
        join_study(hosts.address, host, "m", 1.0, print)
    return str(refused.value)


@pytest.mark.parametrize("host", [0, 2, -1])
def test_an_index_that_is_none(hosts: Hosts, said: list[str], host: int) -> None:
    assert "the study runs on hosts 0 to 1, and 0 is the one that runs it; give --host 1." in refusal(
        hosts, host
    )
    assert said[-1].startswith(f"turned host {host} (m) away: --host {host}")


def test_an_index_that_is_taken(hosts: Hosts, said: list[str]) -> None:
    with listening(hosts):
        wire, _ = join_study(hosts.address, 1, "first", 1.0, print)
        wire.send(Ready(shares_directory=True))
        with pytest.raises(UserError, match=r"host 1 \(first\) has joined already"):
            join_study(hosts.address, 1, "second", 1.0, print)
        wire.hang_up()
        until(said, "host 1 (first) left the study")
        join_study(hosts.address, 1, "first", 1.0, print)


def test_other_versions_and_too_few_devices(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.hosts.join.versions_here", lambda: {"dhen-search": "0.0.1"})
    assert "dhen-search is 0.0.1 on that host and" in refusal(hosts)
    monkeypatch.undo()
    monkeypatch.setattr("trials.hosts.hosts.devices_here", lambda: 2)
    monkeypatch.setattr("trials.hosts.join.devices_here", lambda: None)
    assert "one of the two hosts has CUDA devices" in refusal(hosts)
    monkeypatch.setattr("trials.hosts.join.devices_here", lambda: 1)
    assert "it has 1 CUDA device(s)" in refusal(hosts)


def test_another_secret(hosts: Hosts, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = {threading.current_thread(): "a guess"}  # the first host greets in a thread of its own
    monkeypatch.setattr(
        "trials.hosts.wire._secret", lambda: own.get(threading.current_thread(), "right").encode()
    )
    assert f"set {SECRET} to the same value" in refusal(hosts)
    until(said, f"set {SECRET} to the same value")


def test_a_log_that_is_not_there(hosts: Hosts, log: PreparedLog, said: list[str], tmp_path: Path) -> None:
    for changes in ({"log_directory": str(tmp_path / "none")}, {"log": "another"}):
        with listening(hosts):
            wire, welcome = join_study(hosts.address, 1, "m", 1.0, print)
            with pytest.raises(UserError, match="All hosts need the prepared log at the same path"):
                check_log(wire, welcome.replace(**changes))
            until(said, "host 1 (m) cannot take part")
        assert "All hosts need the prepared log" in said.pop()


def test_a_stranger_keeps_nobody_waiting(hosts: Hosts, said: list[str]) -> None:
    address = ("127.0.0.1", int(hosts.address.rpartition(":")[2]))
    with socket.create_connection(address), socket.create_connection(address) as talks, listening(hosts):
        talks.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        join_study(hosts.address, 1, "m", 1.0, print)
        until(said, "turned 127.0.0.1 away")


def test_addresses_where_nobody_is_and_where_somebody_is_already(hosts: Hosts) -> None:
    with pytest.raises(UserError, match="nobody waits for hosts at"):
        join_study(free_address(), 1, "m", 0.0, print)
    with pytest.raises(UserError, match="Give host:port with an address of this machine and a free port"):
        listen(hosts.address)
    with pytest.raises(UserError, match="cannot wait for other hosts there"):
        listen("203.0.113.7:29500")  # of a documentation network
    with pytest.raises(UserError, match="at which the other hosts reach this machine"):
        listen("0.0.0.0:29500")
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as connected:
                connected.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(UserError, match="no host of a dhen-search study"):
            join_study(f"127.0.0.1:{other.getsockname()[1]}", 1, "m", 0.0, print)
        thread.join()
