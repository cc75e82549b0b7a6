"""Classes of a user's own Python files, which a registry takes in beside its own members."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pydantic import BaseModel

from dhen.errors import UserError

Kind = TypeVar("Kind", bound=BaseModel)


class OwnFileError(UserError, ImportError):
    """A file of the user's that cannot be taken in.

    It is an import error too, which the fork server passes over: the process that asks says it.
    """


def classes_of_own_files(variable: str, base: type[Kind], *, known: Collection[str]) -> dict[str, type[Kind]]:
    """Imports the files that an environment variable names, and returns what they define by `kind`.

    Args:
        variable: name of the variable; paths in it are divided as in `PATH`.
        base: class whose subclasses are looked for; each has a field `kind` with its name as the default.
        known: names that are taken.

    Raises:
        OwnFileError: for a file that is missing, cannot be imported, or defines nothing or a name that is taken.
    """
    found: dict[str, type[Kind]] = {}
    for path in map(Path, filter(None, os.environ.get(variable, "").split(os.pathsep))):
        module = _imported(path, variable)
        classes = [
            own
            for own in vars(module).values()
            if isinstance(own, type)
            and issubclass(own, base)
            and own.__module__ == module.__name__
            and not own.__name__.startswith("_")
        ]
        if not classes:
            raise OwnFileError(f"{variable}: {path} defines no subclass of {base.__name__}.")
        for own in classes:
            kind = own.model_fields["kind"].default
            if not isinstance(kind, str) or kind in known or kind in found:
                raise OwnFileError(
                    f"{variable}: {path}: {own.__name__} needs a `kind` of its own as default (received {kind!r})."
                )
            found[kind] = own
    return found


def _imported(path: Path, variable: str) -> ModuleType:
    name = f"own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve()) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise OwnFileError(
            f"{variable} names {path}, which is no Python file; give its path, e.g. /home/me/gate.py."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their module up while it is imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file does
        del sys.modules[name]
        raise OwnFileError(
            f"{variable}: {path} cannot be imported: {type(error).__name__}: {error}."
        ) from error
    return module
