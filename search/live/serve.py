"""The server process of `dhen-search ui`: `python -m search.live.serve`, with its settings in a variable."""

from __future__ import annotations

import os
import socket
import sys

import pandas  # noqa: F401  whole before there are threads: plotly would take what another has imported of it so far
import uvicorn

from dhen.errors import UserError
from search.live.app import web_app
from search.live.settings import LISTENER, READY, VARIABLE, UiSettings

END_SECONDS = 2
"""Seconds that answers under way are given at the end."""


def main() -> int:
    """Serves until it is ended."""
    settings = UiSettings.model_validate_json(os.environ.pop(VARIABLE))
    try:
        app = web_app(settings)
    except UserError as error:
        print(error)
        return 2
    config = uvicorn.Config(
        app,
        access_log=False,  # the first request's address holds the token
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=END_SECONDS,
    )
    listener = socket.socket(fileno=int(os.environ.pop(LISTENER)))
    _Server(config, ready=int(os.environ.pop(READY))).run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    """Says when it answers, to a file descriptor."""

    def __init__(self, config: uvicorn.Config, *, ready: int) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes requests, then says so."""
        await super().startup(sockets)
        if self.started:
            os.write(self._ready, b"1")
        os.close(self._ready)


if __name__ == "__main__":
    sys.exit(main())
