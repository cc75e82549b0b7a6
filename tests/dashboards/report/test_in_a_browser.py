"""The report as a person meets it: read from what Chromium draws, clicked, and compared with the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from chromium import Chromium
from records import judged, study, trial
from reports.axe import violations
from reports.planned import HBM, confirmed, planned, planned_study
from tools import needs

from dashboards.names import byte_size, percent, si
from dashboards.report.comparison import render_comparison
from dashboards.report.page import write_page, write_report
from dashboards.rows import columns_of
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind

pytestmark = needs("chromium")

DRAWN = "!!document.querySelector('#figure-front .main-svg')"
PANEL = "document.querySelector('dialog[open]')"
LONG_NAME = "module_with_a_long_name"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def record() -> StudyRecord:
    return confirmed(planned_study(14))


@pytest.fixture(scope="module")
def page(record: StudyRecord, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(record, path)
    return path.as_uri()


def opened(
    browser: Chromium, address: str, *, width: int = 1440, height: int = 900, until: str = DRAWN
) -> None:
    """Opens an address in a fresh page of this size, and waits."""
    browser.open("about:blank")
    browser.resize(width, height)
    browser.open(address)
    browser.wait_for(f"document.readyState === 'complete' && {until}")


def texts(browser: Chromium, selector: str) -> list[str]:
    elements = f"[...document.querySelectorAll({selector!r})]"
    return [str(text) for text in browser.evaluate(f"{elements}.map(e => e.textContent)")]


def change(browser: Chromium, control: str, value: str, event: str) -> None:
    """Gives a control a value, as a person does who types or chooses."""
    found = f"document.getElementById({control!r})"
    browser.evaluate(f"(c => {{ c.value = {value!r}; c.dispatchEvent(new Event({event!r})); }})({found})")


def curve_points(browser: Chromium) -> int:
    """Number of points of the curve that is drawn in the panel."""
    path = browser.evaluate("document.querySelector('dialog svg.curve path').getAttribute('d')")
    return str(path).count("L") + 1


def test_the_first_screen_answers_all_questions_without_scrolling(browser: Chromium, page: str) -> None:
    opened(browser, page)
    below = browser.evaluate(
        "[...document.querySelectorAll('.answers dd, .commands li')]"
        ".filter(e => e.getBoundingClientRect().bottom > innerHeight).length"
    )
    assert below == 0
    assert texts(browser, ".answers dt") == [
        "How much better?",
        "At what cost?",
        "Is it certain?",
        "Does it fit?",
    ]
    figure = browser.evaluate("document.querySelector('#figure-front .drawing').getBoundingClientRect().top")
    assert figure < 300
    assert browser.evaluate("performance.getEntriesByType('resource').map(e => e.name)") == []


def test_the_table_shows_what_the_record_has_and_sorts(
    browser: Chromium, page: str, record: StudyRecord
) -> None:
    opened(browser, page)
    columns = [column for column in columns_of(record) if column.shown != "panel"]
    place = [column.id for column in columns].index("ne")
    expected = {str(each.number): each.result.validation for each in record.trials}
    for direction in (1, -1):
        browser.evaluate("document.getElementById('sort-ne').click()")
        rows = browser.evaluate(
            "JSON.stringify([...document.querySelectorAll('#trials-table tbody tr')]"
            f".map(r => [r.dataset.trial, r.cells[{place}].textContent]))"
        )
        found = json.loads(rows)
        known = [float(text) for _, text in found if text != "–"]
        assert known == sorted(known, reverse=direction < 0)
        assert all(text == "–" for _, text in found[len(known) :])
        assert dict(found) == {
            number: f"{metrics.ne:.5f}" if metrics else "–" for number, metrics in expected.items()
        }
        assert browser.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1


def test_the_filter_finds_and_is_kept_over_a_reload(
    browser: Chromium, page: str, record: StudyRecord
) -> None:
    opened(browser, page)
    browser.type("document.getElementById('filter-words')", "baseline")
    rows = "[...document.querySelectorAll('#trials-table tbody tr')].map(r => Number(r.dataset.trial))"
    browser.wait_for(f"{rows}.length === 1")
    opened(browser, page)
    assert browser.evaluate(rows) == [record.baseline]
    change(browser, "filter-words", "", "input")
    assert len(browser.evaluate(rows)) == len(record.trials)


def test_a_click_on_a_point_opens_its_trial(browser: Chromium, page: str, record: StudyRecord) -> None:
    opened(browser, page)
    place = browser.evaluate(
        "(p => { const r = p.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })"
        "([...document.querySelectorAll('#figure-front .scatterlayer .trace:last-child path.point')].at(-1))"
    )
    browser.click(*place)
    browser.wait_for(f"!!{PANEL}")
    number = int(browser.evaluate("location.hash").removeprefix("#trial-"))
    assert number in {*record.front, record.best, record.knee, record.baseline}
    assert texts(browser, "#candidate-title") == [f"Trial {number}"]


def test_the_panel_is_the_records_candidate(browser: Chromium, page: str, record: StudyRecord) -> None:
    opened(browser, f"{page}#trial-3", until=f"!!{PANEL}")
    assert record.trial(3).attempts[0].strategy == "zero2"
    drawn = texts(browser, "dialog svg.diagram text")
    for words in (
        "inputs",
        "Layer 1",
        "attention",
        "dlrm",
        "concat",
        "shortcut",
        "rms norm",
        "head",
        "16 × 16",
    ):
        assert words in drawn
    ladder = texts(browser, "dialog .ladder li")
    assert texts(browser, "dialog .ladder strong") == ["dp", "zero1", "hsdp", "zero2", "fsdp"]
    assert "lacks 16.0 MiB" in ladder[0]
    assert "ran out of memory: a rank needed 27.0 MiB" in ladder[3]
    assert "chosen" in ladder[4]
    edges = browser.evaluate(
        "(b => [b.querySelector('.fill').getBoundingClientRect().width, "
        "b.querySelector('.limit').getBoundingClientRect().left - b.getBoundingClientRect().left])"
        "(document.querySelector('dialog .ladder li:last-child .track'))"
    )
    assert edges[0] / edges[1] == pytest.approx(19 * 2**20 / HBM, rel=0.02)
    assert texts(browser, "dialog .cost > details > summary > span:first-child") == [
        "features",
        "layer 1",
        "layer 2",
        "head",
    ]
    modules = texts(browser, "dialog .cost > details:nth-child(2) > details > summary > span:last-child")
    assert modules[:2] == [si(50_000.0), si(30_000.0)]
    assert curve_points(browser) == len(record.trial(3).result.curve)
    assert len(texts(browser, "dialog article .scroll tbody tr")) == 2


def test_a_trial_that_is_kept_says_the_command_that_exports_it(
    browser: Chromium, page: str, record: StudyRecord
) -> None:
    opened(browser, f"{page}#trial-{record.best}", until=f"!!{PANEL}")
    command = f"dhen-search export {record.directory} --pick {record.best} --out trial-{record.best}"
    assert texts(browser, "dialog .command code") == [command]
    left_out = next(each.number for each in record.candidates if each.number not in record.front)
    opened(browser, f"{page}#trial-{left_out}", until=f"!!{PANEL}")
    assert texts(browser, "dialog .command code") == []
    assert "weights were not kept" in browser.evaluate(f"{PANEL}.textContent")


def test_keys_open_close_and_go_back(browser: Chromium, page: str) -> None:
    opened(browser, page)
    browser.evaluate("document.getElementById('row-2').focus()")
    browser.press("Enter")
    browser.wait_for(f"!!{PANEL}")
    assert browser.evaluate("document.activeElement.id") == "close-candidate"
    browser.press("Escape")
    browser.wait_for(f"!{PANEL} && location.hash === ''")
    browser.wait_for("document.activeElement.id === 'row-2'")
    browser.evaluate("location.hash = 'trial-4'")
    browser.wait_for(f"!!{PANEL}")
    browser.evaluate("history.back()")
    browser.wait_for(f"!{PANEL}")
    opened(browser, f"{page}#trial-5", until=f"!!{PANEL}")
    browser.press("Escape")
    browser.wait_for(f"!{PANEL}")
    assert browser.evaluate("location.hash") == ""


def test_two_candidates_stand_side_by_side(browser: Chromium, page: str) -> None:
    opened(browser, f"{page}#trial-1", until=f"!!{PANEL}")
    change(browser, "beside", "0", "change")
    browser.wait_for("document.querySelectorAll('dialog article').length === 2")
    assert browser.evaluate("location.hash") == "#trial-1-0"
    lefts = browser.evaluate(
        "[...document.querySelectorAll('dialog article')].map(e => e.getBoundingClientRect().left)"
    )
    assert lefts[1] > lefts[0] + 400
    assert "Model" in texts(browser, "dialog > details td:first-child")


@pytest.mark.parametrize("width", [1440, 390])
def test_flops_ne_and_technique_are_seen_in_every_window(
    browser: Chromium, width: int, tmp_path: Path
) -> None:
    layer = {"modules": [{"kind": f"{LONG_NAME}_{i}"} for i in range(12)], "ensemble": {"kind": "concat"}}
    trials = [planned(n).with_job(model={"embedding_dim": n, "layers": [layer] * 3}) for n in range(1, 5)]
    technique = "fsdp+full_checkpointing+cpu_offload+micro_batches=16"
    trials = [each.with_result(technique=technique) for each in trials]
    record = judged([trial(0, Random(0), kind=TrialKind.BASELINE), *trials])
    write_report(record, tmp_path / "report.html")
    rows = "document.querySelectorAll('#trials-table tbody tr').length === 5"
    opened(browser, (tmp_path / "report.html").as_uri(), width=width, height=844, until=rows)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    shown = [column.id for column in columns_of(record) if column.shown != "panel"]
    for name in ("trial", "ne", "relative", "flops", "technique"):
        cells = f"[...document.querySelectorAll('#trials-table tr > :nth-child({shown.index(name) + 1})')]"
        inside = browser.evaluate(
            f"{cells}.every(c => {{ const r = c.getBoundingClientRect(); "
            "return r.width > 20 && r.left >= 0 && r.right <= innerWidth && c.scrollWidth <= c.clientWidth + 1; })"
        )
        assert inside, name
    browser.evaluate("location.hash = 'trial-1'")
    browser.wait_for(f"!!{PANEL}")
    assert browser.evaluate(f"{PANEL}.scrollWidth <= {PANEL}.clientWidth")


@needs("axe")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Chromium, page: str, record: StudyRecord, theme: str, tmp_path: Path
) -> None:
    browser.prefer(theme)
    write_page(tmp_path / "two.html", lambda: render_comparison(record, study()))
    two = "!!document.querySelector('#figure-fronts .main-svg')"
    details = "[...document.querySelectorAll('dialog details, #figure-front details')]"
    openings = f"{details}.forEach(d => {{ d.open = true; }})"
    addresses = [(page, DRAWN), (f"{page}#trial-3-0", f"!!{PANEL}"), ((tmp_path / "two.html").as_uri(), two)]
    for address, until in addresses:
        opened(browser, address, until=until)
        browser.evaluate(openings)
        assert violations(browser) == [], address
    browser.prefer("light")


def test_paper_has_all_figures_in_dark_ink(browser: Chromium, page: str) -> None:
    browser.prefer("dark")
    opened(browser, page)
    figures = "document.querySelectorAll('main figure .drawing').length"
    inks = (
        "[...document.querySelectorAll('main figure')].filter(f => f.querySelector('.xtick text'))"
        ".map(f => getComputedStyle(f.querySelector('.xtick text')).fill)"
    )
    assert browser.evaluate(inks)[0] == "rgb(231, 234, 238)"
    browser.print_preview(on=True)
    browser.wait_for(f"document.querySelectorAll('figure[data-drawn]').length === {figures}")
    assert set(browser.evaluate(inks)) == {"rgb(25, 29, 34)"}
    browser.print_preview(on=False)
    browser.prefer("light")


def test_numbers_in_scripts_are_written_as_in_python(browser: Chromium, page: str) -> None:
    """`units.js` is `dashboards/names.py` again; here it is read from the page's own script."""
    source = (Path(__file__).parents[3] / "dashboards/report/templates/units.js").read_text(encoding="utf-8")
    random = Random(3)
    values = [0.0, 1.0, 998.0, 999.4, 999.6, 1023.0, 1024.0, -0.003, -0.4, 123456.0, 9.995e6, 5e16]
    values += [random.uniform(1, 10) * 10 ** random.randint(-2, 13) for _ in range(200)]
    for name, unit in (("si", si), ("byteSize", byte_size), ("percent", percent)):
        found = browser.evaluate(f"(() => {{ {source}; return {json.dumps(values)}.map({name}); }})()")
        assert found == [unit(value) for value in values]


def test_hostile_names_are_text_in_every_part(browser: Chromium, tmp_path: Path) -> None:
    evil = "<img src=x onerror=document.title='taken'></script><script>document.title='taken'</script>"
    model = {
        "family": evil,
        "embedding_dim": 8,
        "layers": [{"modules": [{"kind": evil, evil: evil}], "ensemble": evil}],
    }
    bad = planned(1, out_of_memory=True).with_job(model=model).with_result(error=evil)
    bad = bad.replace(point={evil: evil})
    record = judged(
        [trial(0, Random(0), kind=TrialKind.BASELINE), bad], name=evil, space=evil, directory=evil
    )
    write_report(record, tmp_path / "report.html", notes=[evil])
    opened(browser, f"{(tmp_path / 'report.html').as_uri()}#trial-1", until=f"!!{PANEL}")
    browser.evaluate("[...document.querySelectorAll('details')].forEach(d => { d.open = true; })")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.title") != "taken"
    assert any(evil in text for text in texts(browser, "dialog td"))
    assert evil[:10] in "".join(texts(browser, "dialog svg.diagram text"))


def test_a_thousand_candidates_of_a_hundred_points_are_ten_megabytes_and_open(
    browser: Chromium, tmp_path: Path
) -> None:
    baseline = trial(0, Random(0), kind=TrialKind.BASELINE, points=100)
    record = judged([baseline, *(planned(n, points=100) for n in range(1, 1001))], budget=1000)
    write_report(record, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= 10e6
    rows = "document.querySelectorAll('#trials-table tbody tr').length === 1001"
    opened(browser, (tmp_path / "report.html").as_uri(), until=rows)
    assert browser.evaluate("document.querySelectorAll('figure[data-drawn]').length") <= 1, (
        "figures are drawn late"
    )
    browser.evaluate("document.getElementById('row-777').click()")
    browser.wait_for(f"{PANEL}?.querySelector('svg.curve') !== null")
    assert curve_points(browser) == 100
