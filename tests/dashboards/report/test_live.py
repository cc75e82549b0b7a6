"""A page that is served while its study goes on: it follows the study, and what a reader has open stays."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import Chromium
from reports.planned import planned_study
from tools import needs

from dashboards.report.page import LivePage, render
from trials.records.study_record import StudyRecord

pytestmark = needs("chromium")


class StudyServer(ThreadingHTTPServer):
    """Serves a study's page and its version, which is the number of its candidates."""

    record: StudyRecord

    @property
    def version(self) -> str:
        return str(len(self.record.candidates))


class Answers(BaseHTTPRequestHandler):
    server: StudyServer

    def do_GET(self) -> None:
        if self.path == "/version":
            body, kind = json.dumps({"version": self.server.version}), "application/json"
        else:
            live = LivePage(url="/version", version=self.server.version)
            body, kind = render(self.server.record, live=live), "text/html; charset=utf-8"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def server() -> Iterator[StudyServer]:
    with StudyServer(("127.0.0.1", 0), Answers) as served:
        served.record = planned_study(5, finished=False)
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_the_page_follows_the_study_and_keeps_what_is_open(server: StudyServer, tmp_path: Path) -> None:
    rows = "document.querySelectorAll('#trials-table tbody tr').length"
    with Chromium(tmp_path / "profile") as browser:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.wait_for(f"document.readyState === 'complete' && {rows} === 6")
        browser.wait_for("!!document.querySelector('#figure-front .main-svg')")
        browser.evaluate("document.getElementById('sort-ne').click()")
        browser.evaluate("scrollTo(0, 700)")
        browser.evaluate("location.hash = 'trial-3'")
        browser.wait_for("!!document.querySelector('dialog[open]')")
        browser.evaluate("document.querySelector('dialog').scrollTop = 400")
        server.record = planned_study(8, finished=False)
        browser.wait_for(f"{rows} === 9")
        assert browser.evaluate("document.querySelector('dialog[open]').scrollTop") == 400
        assert browser.evaluate("document.getElementById('candidate-title').textContent") == "Trial 3"
        assert browser.evaluate("document.querySelector('th[aria-sort]').textContent") == "NE"
        assert browser.evaluate("scrollY") == 700
        assert browser.evaluate("document.querySelector('.progress').textContent").startswith("running, 8 of")
        server.shutdown()
        server.server_close()
        browser.wait_for("document.querySelector('.live').textContent.startsWith('not up to date')")
        assert browser.evaluate(rows) == 9
