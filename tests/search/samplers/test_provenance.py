"""Numbers that steer a proposal or end a training say where they come from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import search.samplers

FOLDERS = [Path(package.__path__[0]) for package in (search.samplers,)]
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))
SOURCES = ("assumption", "measured", "docs/", "benchmarks/", "arXiv", "Optuna", "by definition")
"""Words of which a constant's docstring has one: what it was taken from, or that it was not measured."""
PLAIN = (0, 1, 2)
"""Numbers that a formula may have in a function's body."""


def numeric_constants(source: str) -> dict[str, str | None]:
    """Names of module-level UPPER_CASE numbers, or tuples of them, each with the docstring under it."""
    body = ast.parse(source).body
    constants = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for name in (
            node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
        ):
            if name.isupper() and _is_numeric(value):
                constants[name] = _text(following)
    return constants


def _is_numeric(value: ast.expr) -> bool:
    """Whether this is made of numbers and of other constants alone, with a number at least."""
    nodes = list(ast.walk(value))
    allowed = (
        ast.Constant,
        ast.Tuple,
        ast.BinOp,
        ast.UnaryOp,
        ast.Name,
        ast.operator,
        ast.unaryop,
        ast.expr_context,
    )
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return (
        bool(numbers)
        and all(isinstance(node, allowed) for node in nodes)
        and all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)
    )


def _text(statement: ast.stmt | None) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


def hidden_numbers(source: str) -> list[float]:
    """Fractions in the bodies of functions that a formula does not have by itself."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    constants = (
        node.value for function in functions for node in ast.walk(function) if isinstance(node, ast.Constant)
    )
    return [
        value
        for value in constants
        if isinstance(value, float) and value not in (0.25, 0.5, 4.0, *PLAIN) and value > 1e-6
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-2:]))
def test_every_number_of_a_sampler_or_a_stopping_rule_says_where_it_comes_from(file: Path) -> None:
    for name, docstring in numeric_constants(file.read_text()).items():
        assert docstring is not None, (
            f"{file.name}: {name} needs a docstring under it that says where it comes from"
        )
        assert any(word in docstring for word in SOURCES), (
            f"{file.name}: {name} names no source: {docstring!r}"
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-2:]))
def test_no_number_that_was_chosen_hides_in_a_function(file: Path) -> None:
    assert hidden_numbers(file.read_text()) == []


def test_the_check_sees_numbers_tuples_and_what_is_computed_of_them() -> None:
    constants = numeric_constants(
        'A, B = 1, 2\nC = 2.0 / B\n"""Measured."""\nD = (0.5, 1.5)\nE = ("x", 1)\nF: int = -3\n'
    )
    assert constants == {"A": None, "B": None, "C": "Measured.", "D": None, "F": None}


def test_the_check_sees_the_rankers_constants() -> None:
    seen = {name for file in FILES for name in numeric_constants(file.read_text())}
    assert {"TEMPERATURE", "SLOPES", "NOISE", "MEMBERS", "FEWEST_TIMED", "CONFIDENCE"} <= seen
