"""The study and the command line; and, for notebooks, the names that `from search import ...` finds.

They are few (docs/guide/python.md), and each is imported when it is first asked for: importing this package costs
nothing. Everything else is private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhen.errors import UserError
    from search.notebook.bundle_and_plan import open_bundle, plan
    from search.notebook.run import run_study
    from search.notebook.study import open_study

PLACES = {
    "UserError": "dhen.errors",
    "open_bundle": "search.notebook.bundle_and_plan",
    "open_study": "search.notebook.study",
    "plan": "search.notebook.bundle_and_plan",
    "run_study": "search.notebook.run",
}
"""The modules of the names that users import."""
__all__ = ["UserError", "open_bundle", "open_study", "plan", "run_study"]


def __getattr__(name: str) -> Any:
    """One of the names, imported now (PEP 562)."""
    if name not in PLACES:
        raise AttributeError(f"module 'search' has no attribute {name!r}; it has {', '.join(PLACES)}")
    return getattr(importlib.import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *PLACES]
