"""The clock of a study: the wall clock of its commands, of earlier sessions too, but not the time between them."""

from __future__ import annotations

import time
from collections.abc import Callable


class StudyClock:
    """Counts the seconds that the commands of one study have taken."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, began: float | None = None) -> None:
        """A clock that runs from now on.

        Args:
            now: tells the time in seconds from any origin.
            began: what `now` told as the command began, if that was earlier.
        """
        self._now = now
        self._began = now() if began is None else began
        self.earlier_seconds = 0.0
        """Seconds that earlier sessions have taken."""

    def seconds(self) -> float:
        """Seconds of all sessions, this one until now."""
        return self.earlier_seconds + self._now() - self._began
