"""The server process of `dhen-search ui`: `python -m search.live.serve`, with its settings in a variable."""

from __future__ import annotations

import os
import sys

import pandas  # noqa: F401  whole before there are threads: plotly would take what another has imported of it so far
import uvicorn

from dhen.errors import UserError
from search.live.app import web_app
from search.live.settings import VARIABLE, UiSettings

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
    # no log of requests: the first one's address holds the token
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=END_SECONDS,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
