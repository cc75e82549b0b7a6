"""A folder over HTTP, and what was asked of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Site:
    """A folder over HTTP, and the lines of what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                asked.append(self.requestline)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def copies(self) -> int:
        """How often a file was got."""
        return sum(line.startswith("GET") for line in self.asked)


@contextmanager
def web_site(folder: Path) -> Iterator[Site]:
    """Answers from the folder, which it makes, while the block runs."""
    folder.mkdir()
    site = Site(folder)
    thread = threading.Thread(target=site.server.serve_forever)
    thread.start()
    try:
        yield site
    finally:
        site.server.shutdown()
        thread.join()
        site.server.server_close()
