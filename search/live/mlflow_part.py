"""MLflow behind our pages: loaded when it is first asked for and there is a store, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import anyio.to_thread
from starlette.datastructures import URL
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dhen.errors import UserError
from search.live.page import problem_page
from search.mlflow.store import database
from trials.mlflow.web_app import mlflow_web_app

LOG = logging.getLogger(__name__)


class MlflowPart:
    """An ASGI app: MLflow's, once there is a store; until then its addresses lead to the page of the study."""

    def __init__(self, directory: Path | None, study_address: str) -> None:
        self._directory, self._study_address = directory, study_address
        self._app: ASGIApp | None = None
        self._loading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request to MLflow, or says why it cannot."""
        if scope["type"] == "websocket":  # MLflow has none
            await send({"type": "websocket.close", "code": 1000})
            return
        answer = await self._cannot(URL(scope=scope).path)
        app = self._app if answer is None else answer
        assert app is not None
        await app(scope, receive, send)

    async def _cannot(self, path: str) -> ASGIApp | None:
        """The answer where MLflow cannot give one; None where it is loaded."""
        async with self._loading:
            if self._app is not None:
                return None
            if self._directory is None or not database(self._directory).exists():
                if path == "/":
                    return RedirectResponse(self._study_address)
                return HTMLResponse(problem_page("MLflow", "There is no MLflow store here (yet)."), 404)
            try:
                self._app = await anyio.to_thread.run_sync(mlflow_web_app, self._directory)
            except UserError as error:
                return HTMLResponse(problem_page("MLflow", str(error)), 503)
            except (
                Exception
            ) as error:  # whatever a store of another version makes MLflow raise: our pages go on
                LOG.exception("MLflow does not start")
                said = (
                    f"MLflow cannot open its store: {str(error).splitlines()[0] if str(error) else error!r}"
                )
                return HTMLResponse(problem_page("MLflow", said), 503)
            return None
