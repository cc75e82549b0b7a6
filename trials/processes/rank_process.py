"""A rank's process as its watchers see it: whether it lives, how it ended, and how to end it."""

from __future__ import annotations

import os
import signal
from multiprocessing.process import BaseProcess
from typing import Protocol

from trials.processes.post_mortem import STOPPED, state_of


class RankProcess(Protocol):
    """The process of a rank, on this machine or on another."""

    killed: str | None
    """The state that the process was in when `kill` ended it; None where it was not."""

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes: ready once the process may have ended."""

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process lives; below 0 the signal that ended it."""

    def is_alive(self) -> bool:
        """Tells whether the process has not ended yet."""

    def is_stopped(self) -> bool:
        """Tells whether a signal (SIGSTOP) has stopped the process, as far as that can be seen from here."""

    def show_stack(self) -> None:
        """Asks the process to write the stacks of its threads into its log."""

    def kill(self) -> None:
        """Ends the process; `join` waits for that."""

    def join(self) -> None:
        """Waits for the end of the process."""


class LocalRank:
    """The process of a rank on this machine."""

    def __init__(self, process: BaseProcess, device: str | None = None) -> None:
        """Takes over a process that was started, with the id of the CUDA device that it was given, if any."""
        self._process, self.device = process, device
        self.killed: str | None = None

    @property
    def sentinel(self) -> int:
        """See `RankProcess`."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """See `RankProcess`."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """See `RankProcess`."""
        return self._process.is_alive()

    def is_stopped(self) -> bool:
        """See `RankProcess`."""
        return self.is_alive() and state_of(self._process.pid) == STOPPED

    def show_stack(self) -> None:
        """See `RankProcess`."""
        pid = self._process.pid
        if pid is not None and self.is_alive():
            os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """See `RankProcess`."""
        if self.is_alive():
            self.killed = state_of(self._process.pid)
            self._process.kill()

    def join(self) -> None:
        """See `RankProcess`."""
        self._process.join()
