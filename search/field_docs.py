"""What the docstring below each field of a value says, read from the source when it is asked for.

Pydantic can take such docstrings as descriptions (`use_attribute_docstrings`), but reads every class's source when
the class is made: a tenth of a second in each process, for what the reference and `dhen-search blocks` show.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from pydantic import BaseModel


def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a class's fields by name; of a field that a base declares, that base's, unless the class
    has its own."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs |= _declared(base)
    return docs


def _declared(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields that a class itself declares."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            docs[field.target.id] = _text(below)
    return {name: doc for name, doc in docs.items() if doc}


def _text(statement: ast.stmt) -> str:
    """The text of a statement that is a string and nothing else; empty for any other."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return (
        inspect.cleandoc(value.value)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
        else ""
    )
