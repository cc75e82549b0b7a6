"""The ASGI app of `dhen-search ui`: pages of studies at /study, MLflow at every other address."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from search.live.gate import Gate
from search.live.mlflow_part import MlflowPart
from search.live.page import StudyPage, plain_page, problem_page
from search.live.settings import UiSettings
from search.live.sources import StudySource
from search.read_study import run_directory_of, stored_studies
from trials.storage.studies import StoredStudy

LOG = logging.getLogger(__name__)
STUDY = "/study"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
}


def web_app(settings: UiSettings) -> ASGIApp:
    """The whole app, behind its gate.

    Raises:
        UserError: where a database is named that cannot be read.
    """
    mlflow = settings.directory
    if settings.directory is not None:
        page = StudyPage(StudySource(settings.directory), STUDY)
        routes = one_study(page)
    else:
        assert settings.database is not None
        studies = stored_studies(settings.database, settings.study)
        pages = {study.name: _page(settings.database, study, alone=len(studies) == 1) for study in studies}
        routes = several_studies(pages) if len(pages) != 1 else one_study(*pages.values())
        mlflow = run_directory_of(settings.database, studies[0]) if len(pages) == 1 else None
    app = Starlette(
        routes=[*routes, Mount("/", MlflowPart(mlflow, STUDY))], exception_handlers={Exception: _our_mistake}
    )
    return Gate(app, host_names=settings.host_names, token=settings.token, port=settings.port)


def one_study(page: StudyPage) -> list[Route]:
    """Routes of the page of one study."""
    return [
        Route(STUDY, lambda request: _answer(request, page)),
        Route(f"{STUDY}/state", lambda request: _state(page)),
    ]


def several_studies(pages: dict[str, StudyPage]) -> list[Route]:
    """Routes of a list of studies and of the page of each."""

    def named(answer: Callable[[Request, StudyPage], Response]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            page = pages.get(request.path_params["name"])
            return _unknown(request.path_params["name"]) if page is None else answer(request, page)

        return endpoint

    links = "".join(f'<li><a href="{_address(name)}">{html.escape(name)}</a></li>' for name in pages)
    listed = plain_page("Studies", f"<main><h1>Studies</h1><ul>{links}</ul></main>")
    return [
        Route(STUDY, lambda request: HTMLResponse(listed, headers=HEADERS)),
        Route(f"{STUDY}/{{name:path}}/state", named(lambda request, page: _state(page))),
        Route(f"{STUDY}/{{name:path}}", named(_answer)),
    ]


def _page(database: str, study: StoredStudy, *, alone: bool) -> StudyPage:
    source = StudySource(run_directory_of(database, study), (database, study.name))
    return StudyPage(source, STUDY if alone else _address(study.name))


def _address(name: str) -> str:
    return f"{STUDY}/{quote(name)}"


def _answer(request: Request, page: StudyPage) -> Response:
    """The page, or that the browser's own is still the newest; called in a thread, as rendering takes long."""
    text, version = page.html()
    headers = HEADERS | {"ETag": f'"{version}"', "Cache-Control": "no-cache"}
    if version and request.headers.get("if-none-match") == f'"{version}"':
        return Response(status_code=304, headers=headers)
    return HTMLResponse(text, headers=headers)


def _state(page: StudyPage) -> Response:
    return JSONResponse(page.state(), headers=HEADERS | {"Cache-Control": "no-store"})


def _unknown(name: str) -> Response:
    text = problem_page("No such study", f"There is no study {name!r} here; {STUDY} lists those there are.")
    return HTMLResponse(text, 404, headers=HEADERS)


def _our_mistake(request: Request, error: Exception) -> Response:
    """What the reader sees of an error of ours; its stack goes to the server's own output."""
    LOG.error("%s", request.url.path, exc_info=error)
    said = f"The page could not be made: {type(error).__name__}: {error}. That is a mistake of dhen-search."
    return HTMLResponse(problem_page("An error", said), 500, headers=HEADERS)
