"""The documentation site builds without a warning, holds every page, and opens without a network."""

from __future__ import annotations

import re
from pathlib import Path

import build_site
import pytest
import yaml
from chromium import Chromium
from tools import needs

ROOT = Path(__file__).parent.parent.parent
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
SEARCH = "[...document.querySelectorAll('div')].find(div => div.shadowRoot).shadowRoot"


@pytest.fixture(scope="module")
def site() -> Path:
    """As `make docs` builds it; a warning would be an error."""
    assert build_site.build() == 0
    return ROOT / "site"


def pages_in(navigation: list[object]) -> set[str]:
    """Paths of documents that the site's navigation names."""
    found: set[str] = set()
    for entry in navigation:
        for target in entry.values() if isinstance(entry, dict) else (entry,):
            found |= pages_in(target) if isinstance(target, list) else {str(target)}
    return found


@pytest.mark.parametrize("folder", ["guide", "reference", "explanation"])
def test_the_navigation_has_every_page_of(folder: str) -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / folder).glob("*.md")}
    assert pages - pages_in(CONFIG["nav"]) == set(), "add it to nav in mkdocs.yml"


def test_every_document_is_a_page_that_loads_nothing_from_elsewhere(site: Path) -> None:
    for document in (path for path in build_site.files() if path.suffix == ".md"):
        name = "index" if document.stem == "README" else document.stem
        assert (site / document.relative_to(ROOT)).with_name(f"{name}.html").exists(), document
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"""<(?:script|img|iframe|source)[^>]+src=["']?([^"' >]+)""", text)
        loaded += re.findall(r"""<link[^>]+href=["']?([^"' >]+)""", text)
        assert loaded
        assert [address for address in loaded if "//" in address] == [], page
    python = (site / "docs" / "python.html").read_text()
    assert "Returns the probability of a click of each raw row" in python
    assert ":::" not in python


@needs("chromium")
def test_a_reader_without_a_network_finds_a_page(site: Path, tmp_path: Path) -> None:
    with Chromium(tmp_path / "profile") as browser:
        browser.open((site / "index.html").as_uri())
        browser.wait_for("document.querySelectorAll('.md-search__button').length")
        browser.evaluate("document.querySelector('.md-search__button').click()")
        browser.wait_for("[...document.querySelectorAll('div')].some(div => div.shadowRoot)")
        browser.wait_for(f"{SEARCH}.querySelectorAll('input').length")
        browser.type(f"{SEARCH}.querySelector('input')", "memory margin")
        found = browser.wait_for(f"[...{SEARCH}.querySelectorAll('a')].map(link => link.href).join(' ')")
        assert "ranks-and-hosts.html" in found
        assert all(address.startswith("file://") for address in found.split())
