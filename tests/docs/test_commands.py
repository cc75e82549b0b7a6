"""Every command of the guide runs as it stands there, on a small log and made small, and prints what is shown."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from command_line import run_here
from guide_pages import Page, blocks, commands, smaller

from search.cli import VERBS

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guide"
TUTORIAL = GUIDE / "tutorial.md"
PAGES = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]
SLOW = (
    "bundles.md",
    "data.md",
    "online.md",
    "paper-tables.md",
    "plans.md",
    "ranks-and-hosts.md",
    "searching.md",
    "servers.md",
    "spaces.md",
)
"""Pages with many studies, in `make test-all` alone."""
DEEP = "{modules: {linear: {}, dlrm: {}, mlp: {}}, depth: 2, model: {embedding_dim: [4, 8]}}"
"""A space all of whose networks have parts to remove, as `ablate` needs them."""
LANGUAGES = {"sh", "text", "python", "yaml", "json", "sql", "cpp"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What opens a browser opens none."""
    return {**os.environ, "BROWSER": "true"}


@pytest.fixture(scope="module")
def placeholders(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages take for granted; docs/guide/README.md says what each name stands for."""
    folder = tmp_path_factory.mktemp("guide")

    def dhen_search(verb: str, *words: str) -> None:
        done = run_here((verb, *smaller([verb]), *words), environment, folder)
        assert done.returncode == 0, f"{verb} {words}\n{done.stdout}\n{done.stderr}"

    dhen_search("demo", "--out", "demo.csv", "rows=5500", "users=100", "items=30", "affinity=0.5")
    head, *rows = (folder / "demo.csv").read_text().splitlines(keepends=True)
    for generated, name in (("C3", "site"), ("user", "user_id"), ("item", "item_id")):
        head = head.replace(f'"{generated}"', f'"{name}"')
    parts = {"log.csv": rows[:4000], "newer.csv": rows[4000:], "new.csv": rows[5400:]}
    parts |= {"july.csv": rows[4000:4750], "august.csv": rows[4750:]}
    parts |= {"train.csv": rows[:3500], "test.csv": rows[3500:4000]}
    for name, part in parts.items():
        (folder / name).write_text("".join((head, *part)))
    dhen_search("prepare", "log.csv", "--out", "prepared")
    (folder / "deep.yaml").write_text(DEEP)
    dhen_search("run", "--data", "log.csv", "--out", "runs/mine", "trials=2", "space=deep.yaml")
    dhen_search("confirm", "runs/mine")
    return folder


def with_commands() -> list[object]:
    """Pages that have commands to be run, as parameters; slow ones are marked."""
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES
        if any(block.language in ("sh", "python") and not block.not_run for block in blocks(page))
    ]


@pytest.mark.parametrize("page", with_commands())
def test_commands_run_and_print_what_is_shown(
    page: Path, request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    if page == TUTORIAL:
        folder.mkdir()  # it begins with nothing
    else:
        shutil.copytree(request.getfixturevalue("placeholders"), folder)
    with Page(folder=folder, environment=environment) as here:
        for block in blocks(page):
            if not block.not_run:
                here.run(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is_and_calls_verbs_that_there_are(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page.name}:{block.line}: ```{block.language}"
        runs = block.language in ("sh", "python")
        assert runs or not block.not_run, f"{page.name}:{block.line} would not be run anyway"
        for command in commands(block) if block.language == "sh" else ():
            words = command.split("dhen-search ")[1:]
            assert {part.split()[0] for part in words} <= set(VERBS), command
