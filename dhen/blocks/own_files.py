"""Blocks of a user's own Python files, which the registry takes in beside its own members."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path

from dhen.blocks.base import BlockConfig
from dhen.errors import UserError

OWN_FILES = "DHEN_SEARCH_BLOCKS"
"""Variable that names files of blocks outside this package, `:` between them. It is read when `dhen.blocks` is
imported, in every process, so a study, its ranks and whatever loads its bundles know the same blocks."""


class OwnFileError(UserError, ImportError):
    """A file of the user's that cannot be taken in.

    It is an import error too, which the fork server passes over: the process that asks says it.
    """


def blocks_of_own_files(known: Collection[str]) -> dict[str, type[BlockConfig]]:
    """Imports the files that the environment names, and returns the blocks that they define by `kind`.

    Args:
        known: names that are taken.

    Raises:
        OwnFileError: for a file that is missing, cannot be imported, or defines nothing or a name that is taken.
    """
    found: dict[str, type[BlockConfig]] = {}
    for path in map(Path, filter(None, os.environ.get(OWN_FILES, "").split(os.pathsep))):
        name = f"own_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve()) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise OwnFileError(
                f"{OWN_FILES} names {path}, which is no Python file; give its path, e.g. /home/me/gate.py."
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pydantic look their module up while it is imported
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever a user's file does
            del sys.modules[name]
            raise OwnFileError(
                f"{OWN_FILES}: {path} cannot be imported: {type(error).__name__}: {error}."
            ) from error
        classes = [
            own
            for own in vars(module).values()
            if isinstance(own, type)
            and issubclass(own, BlockConfig)
            and own.__module__ == name
            and not own.__name__.startswith("_")
        ]
        if not classes:
            raise OwnFileError(f"{OWN_FILES}: {path} defines no subclass of {BlockConfig.__name__}.")
        for own in classes:
            kind = own.model_fields["kind"].default
            if not isinstance(kind, str) or kind in known or kind in found:
                raise OwnFileError(
                    f"{OWN_FILES}: {path}: {own.__name__} needs a `kind` of its own as default "
                    f"(received {kind!r})."
                )
            found[kind] = own
    return found
