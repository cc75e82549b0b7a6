"""A server of a bundle in processes of its own, for benchmarks, and what its worker holds in memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

COMMAND = (sys.executable, "-c", "from search.cli import main; main()")
HOST = "127.0.0.1"
START_SECONDS = 600.0


class Resident(NamedTuple):
    """Resident memory of a process, in MiB."""

    own: float
    """Memory of its own, which the system can only swap."""
    files: float
    """Pages of mapped files, which the system may drop and read again."""


class Running(NamedTuple):
    """A server that answers."""

    port: int
    process: subprocess.Popen[bytes]
    seconds: float
    """From its start until it answered."""

    def predictions(self, rows: Sequence[dict[str, object]]) -> list[float]:
        """Asks for the probabilities of rows."""
        connection = HTTPConnection(HOST, self.port, timeout=START_SECONDS)
        body = json.dumps({"dataframe_records": rows})
        connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == 200, text
        found: list[float] = json.loads(text)["predictions"]
        return found

    def cpu_seconds(self) -> float:
        """CPU time of the server's processes so far, which other work beside does not change much."""
        return sum(map(_cpu_seconds, _descendants(self.process.pid)))

    def resident(self) -> Resident:
        """Resident memory of the worker, the largest of its processes."""
        return max(map(_resident, _descendants(self.process.pid)), key=sum)


@contextmanager
def serving(*words: object) -> Iterator[Running]:
    """Runs `dhen-search serve` with these words, on a free port; ended when the block ends."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    began = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "serve", *map(str, words), "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        wait_until_up(port, process)
        yield Running(port, process, time.monotonic() - began)
    finally:
        process.terminate()
        process.wait()


def wait_until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until /ping answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            connection = HTTPConnection(HOST, port, timeout=START_SECONDS)
            connection.request("GET", "/ping")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start")


def _descendants(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for child in map(int, children) for pid in (child, *_descendants(child))]


def _resident(pid: int) -> Resident:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {
        name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines if "Rss" in line)
    }
    return Resident(kib["RssAnon"] / 1024, kib["RssFile"] / 1024)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def without_threads() -> None:
    """Servers take the threads that they are told to, not all that there are."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
