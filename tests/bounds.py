"""How large the code base is, and how large it may be: `python tests/bounds.py` prints both.

`tests/test_bounds.py` holds `BOUNDS`, which are lowered as the code becomes smaller. Later changes raise a bound
in the commit that needs it, so that growth is decided and reviewed, and never just happens. Lines are counted as
ruff writes them, which `make lint` demands.

What is counted: Python of the product (the five rooms) and of the tests, and documents but for the generated
reference. Data that tests read, and Python of benchmarks and examples, are not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")
WRITTEN = (*ROOMS, "tests", "benchmarks", "examples", "docs")
"""Folders in which people write; others in a checkout are made (environments, caches, runs)."""
GENERATED = ROOT / "docs" / "reference"

BOUNDS = {
    "product lines": 72_500,
    "product tokens": 454_000,
    "product files": 345,
    "test lines": 47_750,
    "words of documents": 67_000,
}

QUOTED = r"""(?i:[bruf]|[bf]r|r[bf])?(?:
    \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} | \"(?:\\.|[^\"\\\n])*\" | '(?:\\.|[^'\\\n])*' )"""
CODE = r"""\d[\w.]*(?:(?<=[eE])[-+]\w+)? | \w+ |
    \*\*=? | //=? | >>=? | <<=? | -> | \.{3} | := | [-+*/%&|^=<>!@]=? | [][(){},:;.~]"""
TOKEN = re.compile(rf"(?P<comment>\#[^\n]*) | {QUOTED} | (?P<code> {CODE} )", re.VERBOSE | re.DOTALL)
"""The tokens that `tokenize` calls NAME, NUMBER and OP in Python 3.11; strings and comments are read over. Later
versions of `tokenize` split f-strings, and all take four times as long."""


def product_files() -> list[Path]:
    """The Python files of the five rooms."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def documents() -> Iterator[Path]:
    """All documents that are written by hand."""
    yield from ROOT.glob("*.md")
    for folder in WRITTEN:
        yield from (path for path in (ROOT / folder).rglob("*.md") if GENERATED not in path.parents)


def lines(paths: Iterable[Path]) -> int:
    """Number of lines, blank ones included."""
    return sum(path.read_text().count("\n") for path in paths)


def tokens(text: str) -> int:
    """Number of names, numbers and operators in Python code."""
    return sum(match["code"] is not None for match in TOKEN.finditer(text))


def size(name: str) -> int:
    """The number that the bound of this name is for."""
    if name == "product lines":
        return lines(product_files())
    if name == "product tokens":
        return sum(tokens(path.read_text()) for path in product_files())
    if name == "product files":
        return len(product_files())
    if name == "test lines":
        return lines((ROOT / "tests").rglob("*.py"))
    if name == "words of documents":
        return sum(len(path.read_text().split()) for path in documents())
    raise ValueError(f"{name!r} has no bound; there are {', '.join(BOUNDS)}")


def habits() -> dict[str, str]:
    """What has no bound: how long functions of the product are, and the shares of imports and comments."""
    functions = list[int]()
    imports = comments = 0
    for path in product_files():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom):
                assert node.end_lineno is not None
                height = node.end_lineno - node.lineno + 1
                if isinstance(node, ast.Import | ast.ImportFrom):
                    imports += height
                else:
                    functions.append(height)
        comments += sum(match["comment"] is not None for match in TOKEN.finditer(text))
    total = lines(product_files())
    return {
        "lines per function": f"{sum(functions) / len(functions):.1f}",
        "lines that import": f"{100 * imports / total:.1f} %",
        "lines with a comment": f"{100 * comments / total:.1f} %",
    }


def main() -> None:
    print(f"{'':22}{'now':>9}{'bound':>9}")
    for name, bound in BOUNDS.items():
        print(f"{name:22}{size(name):>9,}{bound:>9,}")
    for name, value in habits().items():
        print(f"{name:22}{value:>9}")


if __name__ == "__main__":
    main()
