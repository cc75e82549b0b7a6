"""The model of a bundle as it is on disk now: when the bundle changes, the new one takes the old one's place.

A request is answered by one whole version. A new one is read, its files are compared with their hashes and the
scores of its stored examples with those that it states, all beside the old one; only then does it answer. What is
damaged is refused, with the reason in the log, and the old version goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from dhen.errors import UserError
from search.bundles.bundle import read_bundle
from search.bundles.increments import Version
from search.bundles.scorer import Scorer

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.5
"""Seconds between two looks at the bundle's folder, which take microseconds."""
SETTLE_SECONDS, SETTLE_TRIES = 0.1, 20
"""Pause before a bundle that changed while it was read is read again, and how often that is done."""
IDENTITY_DIGITS = 12

State = tuple[tuple[str, int, int, int], ...]
"""What tells whether a bundle's files are the same: name, inode, size and time of change of each."""


class Served(NamedTuple):
    """A version that answers."""

    scorer: Scorer
    version: Version

    @property
    def name(self) -> str:
        """The version in a word: its number, and how it is known."""
        return f"{self.version.number}-{self.version.identity[:IDENTITY_DIGITS]}"


class LiveModel:
    """The newest whole version of a bundle's folder."""

    def __init__(self, directory: Path, *, mapped: bool) -> None:
        """Reads the bundle.

        Raises:
            UserError: where it is none, or is damaged.
        """
        self._directory, self._mapped = directory, mapped
        self._state, self.served = self._read(None)

    def watch(self) -> None:
        """Looks at the folder for as long as the process lives, in a thread of its own."""
        threading.Thread(target=self._watch, daemon=True, name="bundle").start()

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Serves what is in the folder now, if it is another version and whole."""
        state = _state(self._directory)
        if state in (self._state, ()):  # (): between the two renames that replace a folder, or removed
            return
        try:
            self._state, served = self._read(self.served)
        except Exception as error:  # whatever is wrong with the new files, the old model answers
            self._state = state
            LOG.warning("refused, version %s goes on: %s", self.served.name, error)
            LOG.debug("refused", exc_info=True)
            return
        if served is not self.served:
            LOG.warning("version %s answers, in place of %s", served.name, self.served.name)
            self.served = served

    def _read(self, before: Served | None) -> tuple[State, Served]:
        """Returns a whole version and the state of its files; `before` where it is the same still.

        Where files change while they are read they are read again: hashes of one version say nothing of another's.
        """
        for _ in range(SETTLE_TRIES):
            state = _state(self._directory)
            try:
                served = self._once(before)
            except (UserError, OSError):
                if _state(self._directory) == state:
                    raise
            else:
                if _state(self._directory) == state:
                    return state, served
            time.sleep(SETTLE_SECONDS)
        raise UserError(f"{self._directory} changes all the time; put a bundle in its place by a rename.")

    def _once(self, before: Served | None) -> Served:
        bundle = read_bundle(self._directory)
        if before is not None and bundle.version == before.version:
            return before
        scorer = Scorer(bundle, mapped=self._mapped)
        bundle.check(scorer.model)
        return Served(scorer, bundle.version)


def _state(directory: Path) -> State:
    """Returns the state of a bundle's files; empty where there is no folder. Names that begin with a dot are of
    others: who trains online, or writes an increment, has them."""
    found = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = os.path.join(folder, name)
            try:
                stat = os.stat(path)
            except OSError:
                continue
            found.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
