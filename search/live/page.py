"""The page of one study as the server gives it: the report, with what keeps it up to date; or why there is none.

The page names the address that says whether anything is new, and the version that it has itself, in
`<meta name="study-live" content="URL" data-version="...">`; the answer is
`{"version": ..., "training": [...], "problem": ...}`. The report takes in what is new by itself, and keeps what
the reader has open; a page that says why there is none is loaded anew.
"""

from __future__ import annotations

import hashlib
import html
import threading
import time
from pathlib import Path
from typing import Any

from dashboards.report.page import Live, render
from dhen.errors import UserError
from search.live.sources import StudySource

LEAST_PAUSE_SECONDS = 1.0
PAUSE_RATIO = 10.0
"""Least pause between two renderings over the CPU time of the last: it may be the machine that trains."""
FOLDER = Path(__file__).parent / "templates"


class StudyPage:
    """Renders one study when it has changed and somebody looks; several threads may ask."""

    def __init__(self, source: StudySource, address: str) -> None:
        """A page that is at `address`; its state is at `address`/state."""
        self._source, self._address = source, address
        self._lock = threading.Lock()
        self._html = ""
        self._rendered = self._newest = ""
        self._due = 0.0

    def state(self) -> dict[str, Any]:
        """What a page that is open asks for: the version that it could have, and how far trainings are."""
        try:
            with self._lock:
                version = self._version()
        except UserError as error:
            return {"version": self._newest, "training": [], "problem": str(error)}
        training = [
            {
                "trial": number,
                "examples": progress.examples,
                "total_examples": progress.total_examples,
                "examples_per_second": progress.examples / max(progress.seconds, 1e-9),
            }
            for number, progress in sorted(self._source.progress().items())
        ]
        return {"version": version, "training": training, "problem": None}

    def html(self) -> tuple[str, str]:
        """The page and its version; where there is nothing to show, why, and no version."""
        try:
            with self._lock:
                version = self._version()
                if version != self._rendered:
                    began = time.thread_time()
                    live = Live(url=state_address(self._address), version=version)
                    self._html = with_strip(render(self._source.record(), live=live), reloads=False)
                    self._rendered = version
                    took = time.thread_time() - began
                    self._due = time.monotonic() + max(LEAST_PAUSE_SECONDS, PAUSE_RATIO * took)
                return self._html, self._rendered
        except UserError as error:
            return problem_page(self._source.name, str(error), self._address), ""

    def _version(self) -> str:
        """The newest version; while the pause after a rendering lasts, the one that was rendered."""
        newest = hashlib.sha256(self._source.version().encode()).hexdigest()[:16]
        if time.monotonic() >= self._due or not self._rendered:
            self._newest = newest
        return self._newest


def with_strip(page: str, *, reloads: bool) -> str:
    """A page with a strip that says what trains now; `reloads` has it load the page anew once the version
    differs."""
    script = (FOLDER / "live.js").read_text(encoding="utf-8")
    strip = f'<script id="study-live-strip" data-reload="{"yes" if reloads else "no"}">\n{script}</script>'
    body, end, tail = page.rpartition("</body>")
    return f"{body}{strip}\n{end}{tail}"


def problem_page(title: str, problem: str, address: str | None = None) -> str:
    """A page that says why there is nothing to show; with an address it appears once there is."""
    body = f"<main><h1>{html.escape(title)}</h1><p>{html.escape(problem)}</p></main>"
    page = plain_page(title, body)
    if address is None:
        return page
    hook = f'<meta name="study-live" content="{html.escape(state_address(address))}" data-version="">'
    return with_strip(page.replace("<head>", f"<head>\n{hook}", 1), reloads=True)


def state_address(address: str) -> str:
    """The address that says which version the page at `address` could have."""
    return f"{address}/state"


def plain_page(title: str, body: str) -> str:
    """A small page around a body that is HTML already."""
    text = (FOLDER / "plain.html").read_text(encoding="utf-8")
    return text.replace("{{title}}", html.escape(title)).replace("{{body}}", body)
