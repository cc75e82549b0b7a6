"""Letters of shapes, as in x_BMD, are explained at the head of each file that has more than a few of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file for room in ("dhen", "spaces", "trials", "search") for file in (ROOT / room).rglob("*.py")
)
FEW = 3
"""Letters that a reader of the field knows without a legend: x_BMD."""
SUFFIX = re.compile(r"[a-z][a-z0-9_]*_([A-Z]{1,5})")


def shape_letters(source: str) -> set[str]:
    """Letters of the suffixes of all names in a file."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return {letter for name in names if (match := SUFFIX.fullmatch(name)) for letter in match[1]}


def unexplained(source: str) -> set[str]:
    """Letters in use of which the module's docstring does not say what they count, after `Shapes:`."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    legend = " ".join(docstring.partition("Shapes:")[2].split())
    return {
        letter for letter in shape_letters(source) if not re.search(rf"\b{letter}\b( =.*?)? [a-z]", legend)
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_with_many_letters_of_shapes_says_what_they_count(file: Path) -> None:
    source = file.read_text()
    if len(shape_letters(source)) > FEW:
        assert unexplained(source) == set(), (
            "say it in the module's docstring: Shapes: B examples, M embeddings ..."
        )


def test_letters_are_seen_in_names_arguments_and_attributes() -> None:
    source = '"""Shapes: B examples, M = 2 B embeddings."""\ndef f(x_BM): return x_BM.y_K + CONSTANT_OF'
    assert shape_letters(source) == {"B", "M", "K"}
    assert unexplained(source) == {"K"}
