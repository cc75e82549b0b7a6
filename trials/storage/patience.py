"""Waiting for a database server that is away: what a driver would commit, it commits once the server answers."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from trials.storage.database import Database, ServerGoneError

LOG = logging.getLogger(__name__)
PATIENCE_SECONDS = 600.0
"""Seconds for which a driver waits for the server of its ledger, before it ends; what was finished is safe."""
PAUSE_SECONDS = 0.5
"""Seconds between two tries."""


class _HasDatabase(Protocol):
    @property
    def database(self) -> Database: ...


S = TypeVar("S", bound=_HasDatabase)
P = ParamSpec("P")
R = TypeVar("R")


def patient(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method, which is one transaction that may be done twice, wait for a server that is away.

    It waits as long as its database's `patience_seconds` say, and then raises what it always raised.
    """

    @functools.wraps(method)
    def waits(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        began: float | None = None
        while True:
            try:
                result = method(self, *args, **kwargs)
            except ServerGoneError as error:
                now, patience = time.monotonic(), self.database.patience_seconds
                if began is None and patience:
                    self.database.say(f"waits for the database, for {patience:.0f} s at most: {error}")
                began = now if began is None else began
                if now - began >= patience:
                    raise
                time.sleep(PAUSE_SECONDS)
            else:
                if began is not None:
                    self.database.say(f"the database answers again, after {time.monotonic() - began:.0f} s")
                return result

    return waits
