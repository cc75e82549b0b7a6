"""A run whose processes begin when the scheduler has places for its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from trials.events import Event
from trials.processes.launcher import AnyRun


class LateRun:
    """A `trials.processes.launcher.AnyRun` that begins when it is told to."""

    def __init__(self, start: Callable[[], AnyRun], ranks: int = 1) -> None:
        """`start` asks for the processes; `ranks` is the number of places that they take."""
        self.ranks = ranks
        self._start = start
        self._run: AnyRun | None = None
        self._began = 0.0
        self._given_up = False

    @property
    def begun(self) -> bool:
        """Whether the processes were asked for."""
        return self._run is not None

    @property
    def seconds(self) -> float:
        """Wall clock since the processes were asked for; what was waited for places before does not count."""
        return time.monotonic() - self._began if self.begun else 0.0

    def begin(self) -> None:
        """Asks for the processes.

        Raises:
            UserError: where this machine lacks what they need.
        """
        self._began = time.monotonic()
        self._run = self._start()

    @property
    def ended(self) -> bool:
        """See `AnyRun`; true too where it was given up before it began."""
        return self._given_up if self._run is None else self._run.ended

    @property
    def sentinels(self) -> list[int]:
        """See `AnyRun`; none while places are waited for."""
        return [] if self._run is None else self._run.sentinels

    def new_events(self) -> list[Event]:
        """See `AnyRun`; none while places are waited for."""
        return [] if self._run is None else self._run.new_events()

    def kill(self) -> None:
        """See `AnyRun`."""
        self._given_up = True
        if self._run is not None:
            self._run.kill()
