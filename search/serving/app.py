"""MLflow's scoring protocol over HTTP: /ping, /health, /version and /invocations, as `mlflow models serve` has
it.

Requests are read and scored one after another in a thread of their own, so that /ping answers meanwhile. If
clients must show a token, all but /ping and /health ask for it: those who only watch the server need none.
What waits for scores is bounded; beyond that /invocations answers 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dhen.errors import ScoreError, UserError
from search.bundles.bundle import read_bundle
from search.bundles.increments import Version
from search.bundles.scorer import Scorer
from search.http import bearer, digest, is_token
from search.serving.requests import ContentTypeError, rows_of

# The model of a bundle as it is on disk now: when the bundle changes, the new one takes the old one's place.
#
# A request is answered by one whole version. A new one is read, its files are compared with their hashes and the
# scores of its stored examples with those that it states, all beside the old one; only then does it answer. What
# is damaged is refused, with the reason in the log, and the old version goes on.

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.5
"""Seconds between two looks at the bundle's folder, which take microseconds."""
SETTLE_SECONDS, SETTLE_TRIES = 0.1, 20
"""Pause before a bundle that changed while it was read is read again, and how often that is done."""
IDENTITY_DIGITS = 12

State = tuple[tuple[str, int, int, int], ...]
"""What tells whether a bundle's files are the same: name, inode, size and time of change of each."""


class ServedVersion(NamedTuple):
    """A version that answers."""

    scorer: Scorer
    version: Version

    @property
    def name(self) -> str:
        """The version in a word: its number, and how it is known."""
        return f"{self.version.number}-{self.version.identity[:IDENTITY_DIGITS]}"


class LiveModel:
    """The newest whole version of a bundle's folder."""

    def __init__(self, directory: Path, *, mapped: bool) -> None:
        """Reads the bundle.

        Raises:
            UserError: if it is none, or is damaged.
        """
        self._directory, self._mapped = directory, mapped
        self._state, self.served = self._read(None)

    def watch(self) -> None:
        """Looks at the folder for as long as the process lives, in a thread of its own."""
        threading.Thread(target=self._watch, daemon=True, name="bundle").start()

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Serves what is in the folder now, if it is another version and whole."""
        state = _state(self._directory)
        if state in (self._state, ()):  # (): between the two renames that replace a folder, or removed
            return
        try:
            self._state, served = self._read(self.served)
        except Exception as error:  # whatever is wrong with the new files, the old model answers
            self._state = state
            LOG.warning("refused, version %s goes on: %s", self.served.name, error)
            LOG.debug("refused", exc_info=True)
            return
        if served is not self.served:
            LOG.warning("version %s answers, in place of %s", served.name, self.served.name)
            self.served = served

    def _read(self, before: ServedVersion | None) -> tuple[State, ServedVersion]:
        """Returns a whole version and the state of its files; `before` if it is the same still.

        If files change while they are read they are read again: hashes of one version say nothing of another's.
        """
        for _ in range(SETTLE_TRIES):
            state = _state(self._directory)
            try:
                bundle = read_bundle(self._directory)
                if before is not None and bundle.version == before.version:
                    served = before
                else:
                    scorer = Scorer(bundle, mapped=self._mapped)
                    bundle.check(scorer.model)
                    served = ServedVersion(scorer, bundle.version)
            except (UserError, OSError):
                if _state(self._directory) == state:
                    raise
            else:
                if _state(self._directory) == state:
                    return state, served
            time.sleep(SETTLE_SECONDS)
        raise UserError(f"{self._directory} changes all the time; put a bundle in its place by a rename.")


def _state(directory: Path) -> State:
    """Returns the state of a bundle's files; empty if there is no folder. Names that begin with a dot are of
    others: who trains online, or writes an increment, has them."""
    found = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(folder, name)
            try:
                stat = os.stat(path)
            except OSError:
                continue
            found.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


VERSION_HEADER = "X-Model-Version"
BAD_REQUEST, INTERNAL_ERROR = "BAD_REQUEST", "INTERNAL_ERROR"
UNAUTHENTICATED, BUSY = "UNAUTHENTICATED", "TEMPORARILY_UNAVAILABLE"
"""MLflow's words for errors."""
MOST_REQUESTS = 800
"""Requests that may wait for their scores; a worker has more connections than that, which /ping needs."""
HELD_BODIES = 32
"""Times the largest body: bytes of all bodies, whole or not, that are held at a time."""
SMALL = 64
"""Part of the largest body up to which one is taken even then: large ones that never end shut out no small one."""
DRAINED = 4
"""Times the limit up to which a body that is too large is read to its end: who still sends hears no answer."""


class TooLargeError(UserError):
    """The body is larger than the limit."""


class BusyError(Exception):
    """As much waits for scores already as may wait."""


def make_app(model: LiveModel, *, max_body_bytes: int, token: str | None) -> Starlette:
    """Returns the application that answers with a model's newest version.

    Args:
        model: what scores.
        max_body_bytes: the largest body of a request that is read.
        token: what a request must show to be scored; None if any may be.
    """
    scoring = ThreadPoolExecutor(1, thread_name_prefix="scoring")
    bodies = _Bodies(max_body_bytes)
    expected = None if token is None else digest(token)

    def shows_token(request: Request) -> bool:
        return expected is None or is_token(bearer(request.headers.get("authorization", "")), expected)

    async def ping(request: Request) -> Response:
        return _answer("\n", model.served)

    async def version(request: Request) -> Response:
        if not shows_token(request):
            return _unauthenticated(model.served)
        return _answer(metadata.version("mlflow"), model.served, media_type="text/plain")

    async def invocations(request: Request) -> Response:
        served = model.served  # one version for all of the request
        if not shows_token(request):
            return _unauthenticated(served)
        try:
            content_type = request.headers.get("content-type", "")
            loop = asyncio.get_running_loop()
            async with bodies.whole(request) as body:
                text = await loop.run_in_executor(scoring, _scored, served, body, content_type)
        except BusyError:
            return _error(503, "too many requests wait for their scores: try again.", served)
        except TooLargeError as error:
            return _error(413, str(error), served)
        except ContentTypeError as error:
            return _error(415, str(error), served)
        except UserError as error:
            return _error(400, str(error), served)
        except UnicodeEncodeError as error:
            return _error(400, f"a text of the body is no Unicode: {error}.", served)
        except ScoreError as error:
            return _error(500, str(error), served)
        except Exception:
            LOG.exception("a request failed")
            return _error(500, "the server failed; its log says why.", served)
        return _answer(text, served)

    routes = [
        Route("/ping", ping, methods=["GET"]),
        Route("/health", ping, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/invocations", invocations, methods=["POST"]),
    ]

    async def no_route(request: Request, error: Exception) -> Response:
        known = ", ".join(
            f"{method} {route.path}"
            for route in routes
            for method in sorted(route.methods or ())
            if method != "HEAD"
        )
        status = getattr(error, "status_code", 404)
        return _error(
            status, f"{request.method} {request.url.path} is not answered here; {known} are.", model.served
        )

    return Starlette(routes=routes, exception_handlers={404: no_route, 405: no_route})


def _scored(served: ServedVersion, body: bytes, content_type: str) -> str:
    """Returns the answer to a body, as JSON."""
    rows = rows_of(body, content_type, served.scorer.encoding.schema)
    scores = [] if rows is None else served.scorer.score(rows).tolist()
    return json.dumps({"predictions": scores})


class _Bodies:
    """The bodies that are held: their bytes, and how many are whole and wait for their scores."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = self._whole = 0

    @asynccontextmanager
    async def whole(self, request: Request) -> AsyncIterator[bytes]:
        """Reads a request's body, which is held until the block ends.

        Raises:
            TooLargeError: if it has more bytes than the limit, of which no more is kept.
            BusyError: if no more may be held.
        """
        parts, size, kept = list[bytes](), 0, 0
        try:
            async for part in request.stream():
                size += len(part)
                if size <= self._most_bytes:
                    parts.append(part)
                    kept += len(part)
                    self._bytes += len(part)
                elif size > DRAINED * self._most_bytes:
                    break
                if self._bytes > HELD_BODIES * self._most_bytes and kept > self._most_bytes // SMALL:
                    raise BusyError
            if size > self._most_bytes:
                raise TooLargeError(
                    f"the body has more than {self._most_bytes:,} bytes: send fewer rows at a time, or start the "
                    "server with a higher --max-body."
                )
            if self._whole >= MOST_REQUESTS:
                raise BusyError
            self._whole += 1
            try:
                yield b"".join(parts)
            finally:
                self._whole -= 1
        except ClientDisconnect:
            raise UserError("the connection was closed before the body's end.") from None
        finally:
            self._bytes -= kept


def _answer(
    text: str, served: ServedVersion, status: int = 200, media_type: str = "application/json"
) -> Response:
    return Response(text, status, headers={VERSION_HEADER: served.name}, media_type=media_type)


def _unauthenticated(served: ServedVersion) -> Response:
    answer = _error(401, "show the server's token: `Authorization: Bearer TOKEN`.", served)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _error(status: int, message: str, served: ServedVersion) -> Response:
    code = {401: UNAUTHENTICATED, 503: BUSY}.get(status, INTERNAL_ERROR if status >= 500 else BAD_REQUEST)
    return _answer(json.dumps({"error_code": code, "message": message}), served, status)
