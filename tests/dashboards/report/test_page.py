from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import judged, study, trial
from reports.planned import confirmed, planned_study

from dashboards.report.page import LivePage, packed_plotly, render, write_report
from dhen.errors import UserError
from trials.records.findings import OrderedAxis
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind

EVIL = "<script>alert(1)</script>\"'&</script>"


class Reader(HTMLParser):
    """The page's elements, and its text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside: list[str] = []
        self.scripts: dict[str, str] = {}
        self._id = ""
        self.feed(page.replace(packed_plotly(), ""))

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)
            self._id = dict(attrs).get("id") or ""

    def handle_endtag(self, tag) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data) -> None:
        if not self._inside:
            self.text += data
        elif self._id:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data

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
    assert page.count(packed_plotly()) == 1
    names = ["front", "curves", "modules", "ablations", "slices", "ladder", "predictions", "depth"]
    assert figures(reader) == [f"figure-{name}" for name in (*names, "gain", "timeline", "time")]
    axes = (OrderedAxis(name="embedding_dim", part="model", key="embedding_dim", values=(8, 16, 32)),)
    assert figures(Reader(render(study(axes=axes))))[-2:] == ["figure-time", "figure-axes"]


def figures(reader: Reader) -> list[str]:
    return [name for name in reader.ids("figure-") if not name.endswith("-title")]


def test_headings_go_down_one_level_at_a_time_landmarks_are_named_and_links_lead_somewhere() -> None:
    record = confirmed(planned_study())
    reader = Reader(render(record))
    levels = [int(tag[1]) for tag, _ in reader.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = {attrs["id"] for _, attrs in reader.tags if attrs.get("id")}
    named = [attrs["aria-labelledby"] for tag, attrs in reader.tags if tag in ("section", "figure")]
    assert set(named) <= ids
    links = {attrs["href"].removeprefix("#") for tag, attrs in reader.tags if tag == "a"}
    assert "overview" in links
    assert links <= ids | {f"trial-{each.number}" for each in record.trials}


def test_a_page_says_where_it_is_brought_up_to_date_only_when_it_is_served() -> None:
    live = Reader(render(study(3), live=LivePage(url="/version?a=1&b=<2>", version="7")))
    assert ("meta", {"name": "study-live", "content": "/version?a=1&b=<2>", "data-version": "7"}) in live.tags
    assert "study-live" not in [attrs.get("name") for _, attrs in Reader(render(study(3))).tags]


def poisoned() -> StudyRecord:
    record = study()
    bad = {"family": EVIL, "embedding_dim": 16, "layers": [{"modules": [{"kind": EVIL}], "ensemble": EVIL}]}
    trials = [each.with_job(model=bad).with_result(error=EVIL, technique=EVIL) for each in record.trials]
    log = record.log.replace(name=EVIL)
    return judged(trials, name=EVIL, space=EVIL, sampler=EVIL, log=log)


def test_nothing_from_data_is_markup() -> None:
    clean, evil = Reader(render(study())), Reader(render(poisoned()))
    programs = [
        sum(tag == "script" and attrs.get("type") != "application/json" for tag, attrs in page.tags)
        for page in (clean, evil)
    ]
    assert programs[0] == programs[1] > 0
    assert "alert(1)" in evil.text
    embedded = [script for name, script in evil.scripts.items() if name != "plotly"]
    assert not any("<" in script for script in embedded)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
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
    with pytest.raises(UserError, match=r"a folder; name the file"):
        write_report(study(3), tmp_path)
