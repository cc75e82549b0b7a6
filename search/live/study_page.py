"""The page of one study: the report, with what keeps it up to date, or the reason why there is none.

It names its version and the address that tells whether anything is new (`/study/state` in docs/formats.md). The
report takes in what is new by itself, and keeps what the reader has open. A page that shows a problem has no
version; it is loaded anew once there is a report.
"""

from __future__ import annotations

import hashlib
import html
import threading
import time
from pathlib import Path
from typing import Any

from dashboards.report.page import LivePage, render
from dhen.errors import UserError
from search.read_study import ledger_of, read_stored_study, read_study
from search.run_directory import STUDY_FILE, is_driven, trial_folder
from trials.records.events import EVENTS, EvaluationEvent, EventReader, Progress
from trials.store.ledger import Studies

LEAST_PAUSE_SECONDS = 1.0
PAUSE_RATIO = 10.0
"""Least pause between two renderings over the CPU time of the last: it may be the machine that trains."""
TEMPLATES = Path(__file__).parent / "templates"
PLAIN = (TEMPLATES / "plain.html").read_text(encoding="utf-8")
STRIP = f"<script>\n{(TEMPLATES / 'live.js').read_text(encoding='utf-8')}</script>\n"
"""Script of the strip that shows what trains now."""


class StudyPage:
    """Renders one study when it has changed and somebody looks; several threads may ask."""

    def __init__(self, address: str, place: Path | tuple[str, str], directory: Path | None = None) -> None:
        """Opens nothing yet: the study may begin later.

        Args:
            address: path of the page; its state is at `address`/state.
            place: the study's run directory, or the URL of its database and its name there.
            directory: the run directory of a study in a database, if it is on this machine.
        """
        self._address, self._place = address, place
        self._directory = place if isinstance(place, Path) else directory
        self._ledger: tuple[str, str] | None = None
        self._studies: Studies | None = None
        self._events: dict[int, _Events] = {}
        self._lock = threading.Lock()
        self._html = self._rendered = self._newest = ""
        self._due = 0.0

    def state(self) -> dict[str, Any]:
        """What an open page asks for: the version that it could have, and how far trainings are."""
        try:
            with self._lock:
                version = self._version()
                latest = {number: events.latest for number, events in self._events.items() if events.latest}
        except UserError as error:
            return {"version": self._newest, "training": [], "problem": str(error)}
        training = [
            {
                "trial": number,
                "examples": progress.examples,
                "total_examples": progress.total_examples,
                "examples_per_second": progress.examples / max(progress.seconds, 1e-9),
            }
            for number, progress in sorted(latest.items())
        ]
        return {"version": version, "training": training, "problem": None}

    def html(self) -> tuple[str, str]:
        """The page and its version; if there is nothing to show, a page with the reason and no version."""
        try:
            with self._lock:
                version = self._version()
                if version != self._rendered:
                    began = time.thread_time()
                    if isinstance(self._place, Path):
                        record = read_study(self._place)
                    else:
                        record = read_stored_study(*self._place, self._directory)
                    live = LivePage(url=f"{self._address}/state", version=version)
                    body, end, tail = render(record, live=live).rpartition("</body>")
                    self._html, self._rendered = f"{body}{STRIP}{end}{tail}", version
                    took = time.thread_time() - began
                    self._due = time.monotonic() + max(LEAST_PAUSE_SECONDS, PAUSE_RATIO * took)
                return self._html, self._rendered
        except UserError as error:
            name = self._place.resolve().name if isinstance(self._place, Path) else self._place[1]
            return problem_page(name, str(error), self._address), ""

    def _version(self) -> str:
        """A text that is another one after a commit, an evaluation or the end of a driver; while the pause after a
        rendering lasts, that of the page that was rendered.

        Raises:
            UserError: if there is no study yet, or its database cannot be read.
        """
        if not isinstance(self._place, Path):
            self._ledger = self._place
        elif not (self._ledger and (self._place / STUDY_FILE).exists()):  # maybe removed since
            self._studies = None
            self._ledger = ledger_of(self._place)
        url, name = self._ledger
        self._studies = self._studies or Studies(url)
        committed, driven = self._studies.version(name), False
        if self._directory is not None:
            self._events = {
                number: self._events.get(number) or _Events(trial_folder(self._directory, number) / EVENTS)
                for number in self._studies.running(name)
            }
            for events in self._events.values():
                events.read_on()
            driven = is_driven(self._directory)
        evaluations = {number: events.evaluations for number, events in self._events.items()}
        if time.monotonic() >= self._due or not self._rendered:
            text = repr((committed, evaluations, driven))
            self._newest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._newest


class _Events:
    """The events of a running training so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = EventReader(path)
        self._inode = self._size = 0
        self.evaluations = 0
        self.latest: Progress | None = None

    def read_on(self) -> None:
        """Takes in what is new since the last call."""
        try:
            file = self._path.stat()
        except FileNotFoundError:
            return
        # another attempt begins its file anew, maybe in the inode of the one before
        if file.st_ino != self._inode or file.st_size < self._size:
            self._read = EventReader(self._path)
        self._inode, self._size = file.st_ino, file.st_size
        for event in self._read():
            self.evaluations += isinstance(event, EvaluationEvent)
            self.latest = event if isinstance(event, Progress) else self.latest


def problem_page(title: str, problem: str, address: str | None = None) -> str:
    """A page that shows why there is nothing else; with the address of a study it makes way once there is."""
    body = f"<main><h1>{html.escape(title)}</h1><p>{html.escape(problem)}</p></main>"
    if address is not None:
        body += f'<meta name="study-live" content="{html.escape(address)}/state" data-version="">\n{STRIP}'
    return plain_page(title, body)


def plain_page(title: str, body: str) -> str:
    """A small page around a body that is HTML already."""
    return PLAIN.replace("{{title}}", html.escape(title)).replace("{{body}}", body)
