"""axe-core in a page: what a screen reader, a keyboard or an eye would stumble over."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from chromium import Chromium
from tools import tool

GRAVE = ("serious", "critical")


@cache
def script() -> str:
    """axe.min.js, from the package that `make setup` installs without the browser driver that it is made for."""
    return Path(tool("axe")).with_name("axe.min.js").read_text(encoding="utf-8")


def violations(browser: Chromium) -> list[str]:
    """The rules that the page as it stands breaks seriously, each with the first element that does."""
    browser.evaluate(f"{script()};0")
    found = browser.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(result => JSON.stringify(result.violations.map("
        "v => [v.impact, `${v.id}: ${v.help} (${v.nodes[0].html.slice(0, 160)})`])))"
    )
    return [words for impact, words in json.loads(found) if impact in GRAVE]
