"""Who may look: requests to a name that is this server's, from its own pages, and with its token.

A page of another site that has its name point to this machine (DNS rebinding) is told apart by the name that it
asks for; an IP address cannot be pointed elsewhere. The token comes once in the address (`?token=`), then as a
cookie, or as `Authorization: Bearer TOKEN` from programs.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlencode, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from search.http.token import bearer, digest, is_token
from search.live.page import plain_page
from search.live.settings import TOKEN

ASKS = """<main><h1>This address needs its token</h1>
<p>Open the whole address that <code>dhen-search ui</code> printed, or paste the token that it ends with.</p>
<form><label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Open</button></form></main>"""


class Gate:
    """An ASGI app that hands to another what may pass, and answers the rest."""

    def __init__(self, app: ASGIApp, *, host_names: Collection[str], token: str | None, port: int) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in host_names)}
        self._cookie = f"dhen_search_{port}"  # cookies of one host are shared by its ports
        self._digest = None if token is None else digest(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request or hands it on; one of a page of our own without its `Origin`, which is checked."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(HTTPConnection(scope))
        if refusal is None:
            headers = [(name, value) for name, value in scope["headers"] if name != b"origin"]
            await self._app({**scope, "headers": headers}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refusal(scope, receive, send)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """The answer to a request that may not pass; None for one that may."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._is_ours(host):
            known = ", ".join(sorted(self._names))
            return PlainTextResponse(
                f"{host!r} is no name of this server; use {known} or its IP address.\n", status_code=403
            )
        if origin is not None and urlsplit(origin).netloc != host:
            return PlainTextResponse("a page of another site may not ask this server.\n", status_code=403)
        if self._digest is None:
            return None
        # also with the cookie: the token would stay in the history
        if request.scope.get("method") == "GET" and is_token(
            request.query_params.get(TOKEN, ""), self._digest
        ):
            return self._let_in(request, self._digest)
        if self._shows_token(request, self._digest):
            return None
        return HTMLResponse(
            plain_page("Token needed", ASKS), status_code=401, headers={"WWW-Authenticate": "Bearer"}
        )

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True

    def _shows_token(self, request: HTTPConnection, expected: str) -> bool:
        cookie = request.cookies.get(self._cookie, "").encode()
        return is_token(bearer(request.headers.get("authorization", "")), expected) or hmac.compare_digest(
            cookie, expected.encode()
        )

    def _let_in(self, request: HTTPConnection, cookie: str) -> Response:
        """Sets the cookie, and asks for the same address without the token."""
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != TOKEN]
        answer = RedirectResponse(request.url.path + (f"?{urlencode(rest)}" if rest else ""), status_code=303)
        # lax, not strict: a link in a message must still open the page
        answer.set_cookie(self._cookie, cookie, httponly=True, samesite="lax")
        return answer
