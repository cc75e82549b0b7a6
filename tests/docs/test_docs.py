"""What the documents say exists: paths, verbs, keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from generate_reference import PAGES, all_rows, rows

from dhen.blocks import BLOCKS
from search.analysis.reproduce_tables import CONFIGS
from search.cli import VERBS, cli
from search.config import BUDGET_KEYS, StudyConfig
from search.log_config import DemoConfig
from trials.records.job import TrainingConfig

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "tests/layout_questions.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
README = ROOT / "README.md"
GUIDE = ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "guide").glob("*.md"))]
ROOMS = ("dhen", "spaces", "trials", "search", "dashboards", "tests", "docs", "benchmarks")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`", text)
    scripts = [
        f"{module.replace('.', '/')}.py" for module in re.findall(r"python -m (benchmarks[\w.]+)", text)
    ]
    for path in paths:
        assert (ROOT / path).exists() or path == "dhen/blocks/gate.py", path
    for script in scripts:
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_their_anchors_exist(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_tests_that_documents_name_exist() -> None:
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    named = {found for text in texts for found in re.findall(r"([\w./-]+\.py)::(\w+)", text)}
    assert named, "the pattern no longer matches how docs/security.md writes a test"
    for path, function in sorted(named):
        source = (ROOT / path).read_text()
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), f"{path} has no {function}"


def anchors(document: Path) -> set[str]:
    """Names that GitHub gives the headings of a Markdown document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_has_every_verb_with_its_line_and_a_page_that_tells_of_it() -> None:
    rows = re.findall(
        r"^\| \[`dhen-search ([a-z]+)`\]\((.+?)\) \| (.+) \|$", README.read_text(), re.MULTILINE
    )
    assert {verb: line for verb, _, line in rows} == VERBS
    for verb, page, _ in rows:
        assert f"dhen-search {verb}" in (ROOT / page).read_text(), f"{page} says nothing of {verb}"


def test_readme_stays_short() -> None:
    assert len(README.read_text().split()) <= 700, "what is told at length belongs into docs/guide"


def test_the_guide_lists_all_its_pages_and_verbs() -> None:
    contents = ROOT / "docs" / "guide" / "README.md"
    pages = {path.name for path in contents.parent.glob("*.md")} - {contents.name}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", contents.read_text())) == pages
    assert all(f"`{verb}`" in contents.read_text().replace("dhen-search ", "") for verb in VERBS)


def keys_in_help(verb: str) -> set[str]:
    """Of the lines `about   key, key, ...`; `demo.KEY` is `demo`, and the log is an option."""
    text = CliRunner().invoke(cli, [verb, "--help"]).output
    lines = text.partition("Keys, by what they are about:\n")[2].partition("\n\n")[0].splitlines()
    listed = [re.split(r"\s{2,}", line.strip())[1].split(", ") for line in lines]
    assert "--data" in text
    return {"data"} | {key.partition(".")[0] for keys in listed for key in keys}


def test_help_lists_all_keys() -> None:
    assert keys_in_help("run") == set(StudyConfig.model_fields)
    assert keys_in_help("reproduce") == {key for config in CONFIGS.values() for key in config.model_fields}


@pytest.fixture(scope="module")
def keys() -> tuple[set[str], set[str]]:
    """What may stand before `=`, and what may in files before a colon."""
    reference = all_rows()
    known = {"data", "depth"} | {row.key for row in reference}  # an option, and what `--sweep` says
    known |= {"dt", "country"}  # in names of folders
    known |= set(DemoConfig.model_fields)  # of `demo`, where they stand by themselves
    known |= {f"training.{row.key}" for row in rows(TrainingConfig, skip=set(), pages=PAGES)}
    return known, {row.key.rpartition(".")[2] for row in reference} | set(BLOCKS)


@pytest.mark.parametrize("name", GUIDE)
def test_verbs_keys_and_settings_in_files_exist(name: str, keys: tuple[set[str], set[str]]) -> None:
    text = (ROOT / name).read_text()
    assert set(re.findall(r"dhen-search ([a-z]+)", text)) <= set(VERBS)
    assert set(re.findall(r"(?<![\w.-])([a-z_.]+)=[\w.\[]+", text)) <= keys[0]
    assert set(re.findall(r"`([a-z_]+): [^`]+`", text)) <= keys[1]


def test_the_guide_names_all_that_may_differ_when_a_study_is_resumed() -> None:
    text = (ROOT / "docs/guide/searching.md").read_text()
    (paragraph,) = [each for each in text.split("\n\n") if each.startswith("You can resume a study")]
    assert set(re.findall(r"`(\w+)`", paragraph)) == BUDGET_KEYS
