"""Numbers that steer a proposal or end a training say where they come from."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pkgutil import walk_packages
from types import ModuleType

import search.samplers

MODULES = [import_module(found.name) for found in walk_packages(search.samplers.__path__, "search.samplers.")]
SOURCES = ("assumption", "measured", "docs/", "benchmarks/", "arXiv", "Optuna", "by definition")
"""Words of which a constant's docstring has one: what it was taken from, or that it was not measured."""
PLAIN = (0, 1, 2, 0.25, 0.5, 4.0)
"""Numbers that a formula may have in a function's body."""


def numeric_constants(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Names of the module's UPPER_CASE numbers, or tuples of them, each with the docstring under it."""
    for statement, following in pairwise([*ast.parse(inspect.getsource(module)).body, ast.Pass()]):
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        docstring = following.value if isinstance(following, ast.Expr) else None
        text = str(docstring.value) if isinstance(docstring, ast.Constant) else ""
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name) and node.id.isupper():
                value = getattr(module, node.id)
                numbers = value if isinstance(value, tuple) else (value,)
                if all(type(number) in (int, float) for number in numbers):
                    yield node.id, text


def test_every_number_of_a_sampler_or_a_stopping_rule_says_where_it_comes_from() -> None:
    found = {
        f"{module.__name__}.{name}": text for module in MODULES for name, text in numeric_constants(module)
    }
    assert {"TEMPERATURE", "SLOPES", "CONFIDENCE"} <= {name.rpartition(".")[2] for name in found}
    assert [name for name, text in found.items() if not any(word in text for word in SOURCES)] == []


def test_no_number_that_was_chosen_hides_in_a_function() -> None:
    trees = (ast.walk(ast.parse(inspect.getsource(module))) for module in MODULES)
    functions = (node for tree in trees for node in tree if isinstance(node, ast.FunctionDef))
    constants = (node for each in functions for node in ast.walk(each) if isinstance(node, ast.Constant))
    numbers = [node.value for node in constants if isinstance(node.value, float) and node.value > 1e-6]
    assert [number for number in numbers if number not in PLAIN] == []
