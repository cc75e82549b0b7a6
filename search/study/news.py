"""What a study tells those who watch it: what has changed, who has ended, what else there is to say."""

from __future__ import annotations

from collections.abc import Callable


class News:
    """Of one study, since its driver began."""

    def __init__(self, tell: Callable[[], None]) -> None:
        """`tell` lets the watchers look."""
        self.tell = tell
        self.changes = 0
        """Grows with every change of the record."""
        self.ended: list[int] = []
        """Numbers of the trials that this driver has seen end, in that order."""
        self.notices: list[str] = []
        """What there is to say beside how trials end."""

    def say(self, sentence: str) -> None:
        """One more notice; the watchers have it at once."""
        self.notices.append(sentence)
        self.changes += 1
        self.tell()
