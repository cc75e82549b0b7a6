"""What other studies have trained: those that a study was started from, and those that share a ledger with it."""

from __future__ import annotations

from pathlib import Path

from search.reuse.earlier import Earlier
from search.reuse.shared_results import Reuse
from trials.record import TrialRecord


class Elsewhere:
    """Their results and weights, for one study, and its own for them."""

    def __init__(self, earlier: Earlier, shared: Reuse | None) -> None:
        """`shared`: its side of a shared ledger, if it has one."""
        self._earlier, self._shared = earlier, shared

    def result(self, record: TrialRecord) -> TrialRecord | None:
        """The record of a trial that is about to start with the result of another study, if one has it."""
        known = self._shared.result(record) if self._shared is not None else None
        return known or self._earlier.result(record)

    def fetch_weights(self, record: TrialRecord, target: Path) -> bool:
        """Copies the weights of a result from where it was trained; whether they are here now."""
        if self._shared is not None and self._shared.fetch_weights(record):
            return True
        return record.reused_from_study is not None and self._earlier.fetch_weights(record, target)

    def publish(self, record: TrialRecord) -> None:
        """Lets those that share the ledger find what was trained here."""
        if self._shared is not None and record.attempts:
            self._shared.publish(record)

    def close(self) -> None:
        """Releases the shared ledger."""
        if self._shared is not None:
            self._shared.close()
