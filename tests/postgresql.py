"""A PostgreSQL server for tests, in a folder of its own, that listens on a UNIX socket alone.

Its programs lie beside each other in Debian, outside the path. The server refuses to be root,
so root starts it as the user that the package has made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

USER = "postgres"
SECONDS = "60"


def programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`, of the newest version there is; None without the package."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    on_path = shutil.which("initdb")
    found = versions[-1] if versions else Path(on_path).resolve() if on_path else None
    return found.parent if found else None


def lacking() -> str | None:
    """Why there is no server for tests; None where there is one."""
    if programs() is None:
        return "needs PostgreSQL (Debian's package postgresql)"
    if os.geteuid() == 0 and (shutil.which("runuser") is None or not _has_user()):
        return f"needs the user {USER}, as PostgreSQL refuses to be root"
    return None if find_spec("psycopg") else "needs psycopg"


class Server:
    """A server with one database."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._data = folder, folder / "data"
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

    def _run(self, program: str, *words: object) -> str:
        folder = programs()
        assert folder is not None
        command = [str(folder / program), *map(str, words)]
        if os.geteuid() == 0:
            command = ["runuser", "-u", USER, "--", *command]
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
    # a short path of its own: a socket's may have 107 letters, and the user must be able to go there
    folder = Path(tempfile.mkdtemp(prefix="dhen-pg-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, USER)
    server = None
    try:
        server = Server(folder)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder)


def _has_user() -> bool:
    return any(line.startswith(f"{USER}:") for line in Path("/etc/passwd").read_text().splitlines())
