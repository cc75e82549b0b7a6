"""The server of `dhen-search ui`: pages of studies at /study, MLflow at every other address, one gate before both.

The gate lets requests pass to a name that is this server's, from its own pages, and with its token. A page of
another site that has its name point to this machine (DNS rebinding) is told apart by the name that it asks for; an
IP address cannot be pointed elsewhere. The token comes once in the address (`?token=`), then as a cookie, or as
`Authorization: Bearer TOKEN` from programs.
"""

from __future__ import annotations

import hmac
import html
import os
import socket
import threading
import warnings
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dhen.errors import UserError
from search.http import ANY, LOOPBACK, bearer, digest, is_token
from search.live.study_page import StudyPage, plain_page, problem_page
from search.mlflow.store import artifacts, database, mlflow_errors, open_client, store_uri
from search.read_study import run_directory_of, stored_studies

STUDY = "/study"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
}
ASKS = """<main><h1>This address needs its token</h1>
<p>Open the whole address that <code>dhen-search ui</code> printed, or paste the token that it ends with.</p>
<form><label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Open</button></form></main>"""


def web_app(place: Path | str, name: str | None) -> tuple[ASGIApp, MlflowPages]:
    """The pages of the study in a run directory, or of a database's studies (all, or the one named); and MLflow's.

    Raises:
        UserError: for a database that cannot be read, or has no such study.
    """
    directory: Path | None = None
    pages: dict[str, StudyPage] = {}
    if isinstance(place, Path):
        directory, pages[""] = place, StudyPage(STUDY, place)
    else:
        studies = stored_studies(place, name)
        for study in studies:
            folder, stored = run_directory_of(place, study), (place, study.name)
            if len(studies) == 1:
                directory, pages[""] = folder, StudyPage(STUDY, stored, folder)
            else:
                pages[study.name] = StudyPage(f"{STUDY}/{quote(study.name)}", stored, folder)
    links = "".join(f'<li><a href="{STUDY}/{quote(name)}">{html.escape(name)}</a></li>' for name in pages)
    listed = plain_page("Studies", f"<main><h1>Studies</h1><ul>{links}</ul></main>")

    def answer(request: Request) -> Response:
        """Called in a thread, as rendering takes long."""
        name = request.path_params.get("name", "")
        if page := pages.get(name):
            text, version = page.html()
            headers = HEADERS | {"ETag": f'"{version}"', "Cache-Control": "no-cache"}
            if version and request.headers.get("if-none-match") == f'"{version}"':
                return Response(status_code=304, headers=headers)
            return HTMLResponse(text, headers=headers)
        if not name:
            return HTMLResponse(listed, headers=HEADERS)
        study, _, last = name.rpartition("/")
        if last == "state" and (page := pages.get(study)):
            return JSONResponse(page.state(), headers=HEADERS | {"Cache-Control": "no-store"})
        text = f"There is no study {name!r} here; {STUDY} lists those there are."
        return HTMLResponse(problem_page("No such study", text), 404, headers=HEADERS)

    def mistake(request: Request, error: Exception) -> Response:
        """What the reader sees of an error of ours; uvicorn prints its stack."""
        text = f"The page could not be made: {error!r}. That is a mistake of dhen-search."
        return HTMLResponse(problem_page("An error", text), 500, headers=HEADERS)

    mlflow = MlflowPages(directory)
    routes = [Route(STUDY, answer), Route(f"{STUDY}/{{name:path}}", answer), Mount("/", mlflow)]
    return Starlette(routes=routes, exception_handlers={Exception: mistake}), mlflow


class Gate:
    """An ASGI app that hands to another what may pass, and answers the rest."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str | None) -> None:
        """A gate before `app`, which is asked for at a host and a port; without a token it asks for none."""
        self._app = app
        names = set() if host == LOOPBACK else {host, socket.gethostname(), socket.getfqdn()} - set(ANY)
        self._names = {"localhost", *(name.lower() for name in names)}
        self._cookie = f"dhen_search_{port}"  # cookies of one host are shared by its ports
        self._digest = None if token is None else digest(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request or hands it on; one of a page of our own without its `Origin`, which is checked."""
        answer = self._refusal(Request(scope)) or self._app
        headers = [(name, value) for name, value in scope["headers"] if name != b"origin"]
        await answer({**scope, "headers": headers}, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not pass; None for one that may."""
        host, name, origin = request.headers.get("host", ""), "", request.headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ip_address(name)
        except ValueError:  # no IP address, maybe no name at all
            if name.lower() not in self._names:
                known = ", ".join(sorted(self._names))
                text = f"{host!r} is no name of this server; use {known} or its IP address.\n"
                return PlainTextResponse(text, 403)
        if origin is not None and urlsplit(origin).netloc != host:
            return PlainTextResponse("a page of another site may not ask this server.\n", 403)
        if self._digest is None:
            return None
        query = request.query_params
        if request.method == "GET" and is_token(query.get("token", ""), self._digest):
            # also with the cookie: the token would stay in the history
            rest = urlencode([(name, value) for name, value in query.multi_items() if name != "token"])
            answer = RedirectResponse(request.url.path + (f"?{rest}" if rest else ""), status_code=303)
            # lax, not strict: a link in a message must still open the page
            answer.set_cookie(self._cookie, self._digest, httponly=True, samesite="lax")
            return answer
        cookie = request.cookies.get(self._cookie, "").encode()
        shown = bearer(request.headers.get("authorization", ""))
        if hmac.compare_digest(cookie, self._digest.encode()) or is_token(shown, self._digest):
            return None
        return HTMLResponse(plain_page("Token needed", ASKS), 401, headers={"WWW-Authenticate": "Bearer"})


class MlflowPages:
    """An ASGI app: what `mlflow server` would serve of a study's store, once there is one (decision 32)."""

    def __init__(self, directory: Path | None) -> None:
        """Loads nothing yet; `directory` is the study's run directory, if it is on this machine."""
        self._directory = directory
        self._app: ASGIApp | None = None
        self._loading = threading.Lock()
        self.experiments: list[tuple[str, str]] = []
        """Names and ids of the studies in the store, once it is loaded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request to MLflow, or answers why it cannot."""
        app = self._app
        try:
            app = app or await anyio.to_thread.run_sync(self.load)
        except UserError as error:
            app = HTMLResponse(problem_page("MLflow", str(error)), 503)
        if app is None and scope["path"] == "/":
            app = RedirectResponse(STUDY)
        elif app is None:
            app = HTMLResponse(problem_page("MLflow", "There is no MLflow store here (yet)."), 404)
        await app(scope, receive, send)

    def load(self) -> ASGIApp | None:
        """Loads MLflow's app, which takes seconds, if there is a store by now.

        Raises:
            UserError: if MLflow cannot open the store.
        """
        directory = self._directory
        with self._loading:
            if self._app or directory is None or not database(directory).exists():
                return self._app
            with mlflow_errors(store_uri(directory), own=True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = open_client(store_uri(directory)).search_experiments(
                    filter_string="name != 'Default'"
                )
                self.experiments = [(experiment.name, experiment.experiment_id) for experiment in found]
                store, files = store_uri(directory), artifacts(directory).absolute().as_uri()
                # the variables that `mlflow server` sets; the gate has checked the host names
                os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
                os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = "*"
                from mlflow.server import constants
                from mlflow.server.handlers import initialize_backend_stores

                os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = store
                os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = files
                initialize_backend_stores(store, store, files)
                _keep_to(artifacts(directory).resolve())
                from mlflow.server.fastapi_app import app

                self._app = app
            return self._app


def _keep_to(folder: Path) -> None:
    """Has MLflow read, write and list files of this folder alone, whatever place an experiment, a model or a trace
    names: by a place of its own, anyone who may write to the store could have this user's other files.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
    from mlflow.server import handlers
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    def own_files(uri: str, **stores: str | None) -> LocalArtifactRepository:
        # MLflow itself follows links below the place that it was given
        if urlsplit(uri).scheme in ("", "file"):
            repository = LocalArtifactRepository(uri, **stores)
            if Path(repository.artifact_dir).resolve().is_relative_to(folder):
                return repository
        raise MlflowException(f"{uri}: only files below {folder} are served here.", PERMISSION_DENIED)

    repositories: dict[str, Any] = get_registered_artifact_repositories()
    for scheme in set(repositories) - {"runs", "models"}:  # these look the place up, and ask again
        repositories[scheme] = own_files
    store: Any = handlers._get_tracking_store()
    create = store.create_experiment

    def create_inside(name: str, artifact_location: str | None = None, tags: Any = None) -> str:
        if artifact_location:
            own_files(artifact_location)
        return str(create(name, artifact_location, tags))

    store.create_experiment = create_inside
