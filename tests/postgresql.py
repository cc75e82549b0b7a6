"""A PostgreSQL server for tests, in a folder of its own, that listens on a UNIX socket alone.

The server refuses to be root, so root starts it as the user that the package has made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from tools import POSTGRES as USER
from tools import program, tool

SECONDS = "60"


class Server:
    """A server with one database."""

    def __init__(self, folder: Path, programs: str) -> None:
        self._folder, self._data, self._programs = folder, folder / "data", programs
        self._run("initdb", "-D", self._data, "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@/postgres?host={quote(str(self._folder), safe='')}"

    def start(self) -> None:
        options = f"-k {self._folder} -c listen_addresses='' -c fsync=off"
        log = self._folder / "log"
        self._run("pg_ctl", "-D", self._data, "-o", options, "-l", log, "-t", SECONDS, "-w", "start")

    def stop(self) -> None:
        """At once, as a crash; what was committed stays."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def rows(self, query: str) -> list[str]:
        done = self._run("psql", "-h", self._folder, "-U", USER, "-d", "postgres", "-At", "-c", query)
        return done.splitlines()

    def _run(self, name: str, *words: object) -> str:
        command = [f"{self._programs}/{name}", *map(str, words)]
        if os.geteuid() == 0:
            command = [str(program("runuser")), "-u", USER, "--", *command]
        # output into a file: the server keeps what it inherits open
        with tempfile.TemporaryFile() as said:
            code = subprocess.run(
                command, stdout=said, stderr=subprocess.STDOUT, cwd=self._folder, check=False
            ).returncode
            said.seek(0)
            text = said.read().decode()
        assert code == 0, text
        return text


@contextmanager
def served() -> Iterator[Server]:
    """A server that is gone, folder and all, afterwards."""
    programs = tool("postgresql")
    # a short path of its own: a socket's may have 107 letters, and the user must be able to go there
    folder = Path(tempfile.mkdtemp(prefix="dhen-pg-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, USER)
    server = None
    try:
        server = Server(folder, programs)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder)
