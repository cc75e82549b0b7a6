"""What the documents say exists: paths, verbs, keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from search.analysis.reproduce.config import CONFIGS
from search.cli import VERBS, cli
from search.config import StudyConfig
from trials.job import TrainingConfig
from trials.serving_limits import ServingConfig

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
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


def anchors(document: Path) -> set[str]:
    """Names that GitHub gives the headings of a Markdown document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_verbs_exist_and_are_all_named() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"dhen-search ([a-z]+)", text)) <= set(VERBS)
    log = (ROOT / "CHANGELOG.md").read_text()
    assert all(f"`{verb}`" in log for verb in VERBS)


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


def test_keys_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for key in re.findall(r"\b([a-z_.]+)=[\w.]+", text):
        section, _, name = key.rpartition(".")
        fields = {"": StudyConfig, "training": TrainingConfig, "serving": ServingConfig}[section].model_fields
        assert name in fields, key
