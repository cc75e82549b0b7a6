"""A process that answers requests: it reads the bundle itself, and ends when it is told, or its parent is gone."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from types import FrameType

import torch
import uvicorn

from dhen.errors import UserError
from search.serving.app import make_app
from search.serving.connections import ClientConnection, allow_open_files
from search.serving.live_model import LiveModel
from search.serving.settings import GRACE_SECONDS, Ready, Refused, ServeSettings
from trials.processes.logs import DATE_FORMAT, FORMAT

BACKLOG = 128
"""Connections that wait to be accepted. All are accepted in one turn, before anybody is answered, so this bounds
how much a flood of new ones slows others down (`docs/benchmarks/serving.md`)."""


def main(settings: ServeSettings, listener: socket.socket, parent: Connection) -> None:
    """Answers until it is told to end; tells the parent the version that it serves, or why it serves none."""
    _log()
    allow_open_files()
    torch.set_num_threads(settings.threads)
    try:
        model = LiveModel(settings.bundle, mapped=settings.mapped)
    except UserError as error:
        parent.send(Refused(str(error)))
        return
    app = make_app(model, max_body_bytes=settings.max_body_bytes, token=settings.token)
    config = uvicorn.Config(
        app,
        http=ClientConnection,
        backlog=BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(GRACE_SECONDS),
    )
    server = uvicorn.Server(config)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True, name="parent").start()
    model.watch()
    parent.send(Ready(model.served.name))
    # uvicorn raises the signal that ended it once more when all is answered
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    server.run(sockets=[listener])


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _end_with_parent(server: uvicorn.Server) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    server.should_exit = True


def _log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
