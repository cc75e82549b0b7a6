from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from chromium import EXECUTABLE, Chromium
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs
from records import judged, study, trial

from dashboards.report.page import COLUMNS, columns_of, render, write_report
from dhen.errors import UserError
from trials.ordered_axis import OrderedAxis
from trials.record import Outcome, TrialKind
from trials.study_record import StudyRecord

EVIL = "<script>alert(1)</script>\"'&</script>"


class Reader(HTMLParser):
    """The page's elements, and its text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(page.replace(get_plotlyjs(), ""))

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data) -> None:
        if not self._inside:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def ids(self, prefix: str) -> list[str]:
        found = (attrs.get("id") for _, attrs in self.tags)
        return [name for name in found if name and name.startswith(prefix)]


def test_the_page_holds_all_it_needs() -> None:
    page = render(study())
    reader = Reader(page)
    loaded = [
        attrs for tag, attrs in reader.tags if tag in ("script", "link", "img", "iframe") and "src" in attrs
    ]
    assert loaded == []
    assert reader.count("link") == 0
    assert page.count("plotly.js v") == 1
    assert reader.ids("figure-") == [
        f"figure-{name}" for name in ("front", "curves", "modules", "gain", "timeline", "time")
    ]
    axes = (OrderedAxis(name="embedding_dim", part="model", key="embedding_dim", values=(8, 16, 32)),)
    assert Reader(render(study(axes=axes))).ids("figure-")[-2:] == ["figure-time", "figure-axes"]


def test_table_bytes_are_shown_where_candidates_differ_in_them() -> None:
    record = study()
    trials = [each.with_job(table_bytes=1000 * (1 + each.number % 2)) for each in record.trials]
    differ = Reader(render(record.replace(trials=tuple(trials))))
    assert differ.ids("figure-")[:2] == ["figure-front", "figure-table-bytes"]
    for reader, shown in ((differ, True), (Reader(render(record)), False)):
        assert ("size of embedding tables as training stores them" in str(reader.tags)) == shown


def test_every_trial_is_in_the_table_with_its_error() -> None:
    record = study(60)
    reader = Reader(render(record))
    cost_rows = len(record.trial(record.best).job.cost)
    assert reader.count("tr") == 1 + len(record.trials) + 1 + cost_rows
    assert reader.count("button") == len(columns_of(study()))
    for each in record.trials:
        assert not each.result.error or each.result.error in reader.text


def poisoned() -> StudyRecord:
    record = study()
    bad = {"family": EVIL, "embedding_dim": 16, "layers": [{"modules": [{"kind": EVIL}], "ensemble": EVIL}]}
    trials = [each.with_job(model=bad).with_result(error=EVIL, technique=EVIL) for each in record.trials]
    log = record.log.replace(name=EVIL)
    return judged(trials, name=EVIL, space=EVIL, sampler=EVIL, log=log)


def test_nothing_from_data_is_markup() -> None:
    clean, evil = Reader(render(study())), Reader(render(poisoned()))
    beside_figures = [page.count("script") - len(page.ids("figure-")) for page in (clean, evil)]
    assert beside_figures[0] == beside_figures[1] > 0
    assert "alert(1)" in evil.text
    titles = [
        trace for trace in re.findall(r'"hovertext":\[[^\]]*', render(poisoned())) if "<script" in trace
    ]
    assert titles == []


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=30))
def test_any_name_is_shown_as_it_is(name: str) -> None:
    reader = Reader(render(judged([trial(0, Random(0))], name=f"<{name}>")))
    assert f"<{name}>" in reader.text


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (judged([]), "No trial has started yet."),
        (judged([trial(0, Random(0), outcome=Outcome.FAILED)]), "No candidate has a result."),
        (judged([trial(0, Random(0))]), "there is no baseline yet"),
        (
            judged([trial(0, Random(0), kind=TrialKind.BASELINE)], finished=False),
            "No candidate has ended yet.",
        ),
        (study(3, finished=False), "running, 3 of 3 candidates"),
    ],
    ids=["empty", "all failed", "no baseline", "baseline alone", "running"],
)
def test_studies_with_little_in_them(record: StudyRecord, said: str) -> None:
    assert said in Reader(render(record)).text


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(study(3, finished=False), path)
    first = path.read_text(encoding="utf-8")
    write_report(study(3), path)
    assert path.read_text(encoding="utf-8") != first
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder; name the file"):
        write_report(study(3), tmp_path)


@pytest.mark.browser
@pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium")
def test_in_a_browser_figures_are_drawn_and_headings_sort(tmp_path: Path) -> None:
    record = study()
    write_report(record, tmp_path / "report.html")
    column = [each.value for each in COLUMNS].index("ne")
    cells = f"[...document.querySelectorAll('.sortable tbody td:nth-child({column + 1})')].map(c => c.dataset.key)"
    with Chromium(tmp_path / "profile") as browser:
        browser.open((tmp_path / "report.html").as_uri())
        assert browser.wait_for("document.readyState === 'complete'")
        assert browser.wait_for("document.querySelectorAll('.main-svg').length >= 3")
        for direction in (1, -1):
            browser.evaluate(f"document.querySelectorAll('.sortable th button')[{column}].click()")
            found = browser.evaluate(cells)
            known = [float(key) for key in found if key]
            assert known == sorted(known, reverse=direction < 0)
            assert found[len(known) :] == [""] * (len(found) - len(known))
        assert browser.evaluate("performance.getEntriesByType('resource').map(e => e.name)") == []
        browser.screenshot(tmp_path / "report.png")


LONG_NAME = "module_with_a_long_name"


def studied_long() -> StudyRecord:
    """A study whose models have names longer than any window, and errors of a sentence."""
    layer = {"modules": [{"kind": f"{LONG_NAME}_{i}"} for i in range(12)], "ensemble": {"kind": "concat"}}
    record = study()
    models = ({"embedding_dim": 16 + trial.number, "layers": [layer] * 3} for trial in record.trials)
    trials = [trial.with_job(model=model) for trial, model in zip(record.trials, models, strict=True)]
    return judged(trials)


@pytest.mark.browser
@pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium")
@pytest.mark.parametrize("record", [study(), studied_long()], ids=["usual", "long names"])
def test_in_a_window_of_1024_pixels_ne_and_flops_are_seen_without_scrolling(
    record: StudyRecord, tmp_path: Path
) -> None:
    write_report(record, tmp_path / "report.html")
    with Chromium(tmp_path / "profile") as browser:
        browser.resize(1024, 768)
        browser.open((tmp_path / "report.html").as_uri())
        assert browser.wait_for("document.readyState === 'complete'")
        assert browser.evaluate("window.innerWidth") == 1024
        table = "document.querySelector('.sortable').parentElement"
        frame = browser.evaluate(f"(r => [r.left, r.right])({table}.getBoundingClientRect())")
        assert 0 <= frame[0] < frame[1] <= 1024
        for value in ("trial.number", "ne", "relative_percent", "trial.job.flops"):
            column = [each.value for each in columns_of(record)].index(value)
            cells = f"[...document.querySelectorAll('.sortable tr > :nth-child({column + 1})')]"
            edges = browser.evaluate(
                f"{cells}.map(c => c.getBoundingClientRect()).map(r => [r.left, r.right])"
            )
            assert len(edges) == 1 + len(record.trials)
            assert all(frame[0] <= left < right <= frame[1] for left, right in edges), value
        # the page itself does not scroll to the side: only the table does
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1024
