"""LogConfig: the log of a study and how it is read; `key=value` words. Free of torch, so `prepare` starts soon."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import BaseModel, Field, field_validator, model_validator

from dhen.errors import UserError, unknown_name
from dhen.values import parse, parse_yaml, without_removed
from trials.data.demo import LOGIT_DEVIATION, SHARES, DemoLog
from trials.data.read_options import ReadOptions

DEMO = "demo"
"""The name of the built-in generated log, in place of a path."""
REMOVED_OF_DEMO: dict[str, tuple[Any, str]] = {
    "logit_deviation": (LOGIT_DEVIATION, f"the logit's standard deviation is {LOGIT_DEVIATION}"),
    "shares": (SHARES, "orders of interaction have fixed shares of what own and affinity leave"),
    "most_ids": (None, "a column has 4 to 100,000 ids"),
    "visits_alone": (False, "the other columns are always there; a schema.yaml leaves columns out"),
    "popularity": (0.0, "all users, and all items, come equally often"),
    "rank": (2, "users and items have vectors of length 2"),
    "turn_days": (None, "effects of users and items stay; with lifetime_days others take their place"),
}
"""Keys of the built-in log that there were once: the default, which an earlier `study.yaml` has, and what decides
now."""


class DemoConfig(DemoLog):
    """The built-in demo log."""

    rows: int = Field(default=200_000, ge=1000)
    """Number of examples to generate, in time order over ten days."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, data: Any) -> Any:
        return without_removed(data, REMOVED_OF_DEMO)


class LogConfig(ReadOptions):
    """The log of a study or a table, and how it is read."""

    data: tuple[str, ...] = (DEMO,)
    """Files or folders of the log, a prepared log, URLs of such, or `demo` for the built-in one; on the command
    line `--data`."""
    schema_file: str | None = None
    """Path of a schema.yaml that `prepare` wrote and you edited; the schema is inferred if not given."""
    demo: DemoConfig = DemoConfig()
    """The built-in log, if `data` is `demo`."""

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several_logs(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _of_the_built_in_log(self) -> LogConfig:
        if self.demo != DemoConfig() and self.data != (DEMO,):
            raise ValueError(
                f"demo.KEY are of the built-in log, and data={','.join(self.data)} is another: leave one of the "
                "two out"
            )
        return self


def read_options(
    words: Iterable[str], keys: Collection[str] = tuple(ReadOptions.model_fields), /, **given: Any
) -> ReadOptions:
    """Returns how a log is read, from options of the command line and `key=value` words.

    Raises:
        UserError: for words without `=`, keys that are not among `keys`, and wrong values.
    """
    data = {key: value for key, value in given.items() if value is not None}
    for word in words:
        set_override(data, word)
        if (key := word.partition("=")[0].partition(".")[0]) not in keys:
            raise unknown_name("key", key, keys)
    return parse(ReadOptions, data, "how the log is read")


def set_override(data: dict[str, Any], word: str) -> None:
    """Applies one `dotted.key=value` to nested data; values are read as YAML.

    Raises:
        UserError: for a word that is not of this form.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"{word!r} is not of the form key=value, e.g. trials=30 or training.epochs=2.")
    *path, last = key.split(".")
    for name in path:
        if data.get(name) is None:  # a section whose lines are all comments is there, and empty
            data[name] = {}
        inner = data[name]
        if not isinstance(inner, dict):
            raise UserError(f"{word!r}: {name!r} has no keys below it.")
        data = inner
    if path == ["csv"] and len(text) < 2 and not text.isalnum():  # a mark such as ~ or |, or none
        data[last] = text
        return
    try:  # 0x2 are ranks, no number in hexadecimal
        data[last] = text if text.startswith("0x") else parse_yaml(text) if text else None
    except ValueError as error:
        raise UserError(f"{word!r}: {error}") from None


# What the docstring below each field of a value says, read from the source when it is asked for.
#
# Pydantic can take such docstrings as descriptions (`use_attribute_docstrings`), but reads every class's source
# when the class is made: a tenth of a second in each process, for what the reference and `dhen-search blocks`
# show.


def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a class's fields by name; of a field that a base declares, that base's, unless the class
    has its own."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    docs[field.target.id] = inspect.cleandoc(text.value)
    return docs


# The option `--data`: a log's files, or the built-in `demo` log.

Command = TypeVar("Command", bound=Callable[..., Any])
LOG = "The log: files, a folder, a prepared log, a URL of one, `demo`."
"""Help of a command that takes any log."""


def data_option(help_text: str = LOG, *, required: bool = False) -> Callable[[Command], Command]:
    """Returns the decorator that gives a command the option."""
    return click.option("--data", multiple=True, callback=_files_first, required=required, help=help_text)


def _files_first(
    context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Reads what the current folder holds under the name `demo` rather than the built-in log, and says so."""

    if names != (DEMO,) or not Path(DEMO).exists():
        return names
    click.echo(
        f"--data {DEMO}: the {'folder' if Path(DEMO).is_dir() else 'file'} of this name here is read, not the "
        "built-in demo log; for that run the command in another folder.",
        err=True,
    )
    return (f"./{DEMO}",)
