"""Where a study finds what other studies have trained: a shared ledger, earlier studies that it began from."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trials.record import TrialRecord


class ResultSource(Protocol):
    """Results and weights of other studies, and this study's own for them."""

    def result(self, record: TrialRecord) -> TrialRecord | None:
        """The record of a trial that is about to start with the result of an equal job, if the source has one."""

    def fetch_weights(self, record: TrialRecord, target: Path) -> bool:
        """Copies the weights of a result from where it was trained; says whether they are at `target` now."""

    def publish(self, record: TrialRecord) -> None:
        """Lets other studies find a trial that has ended here."""

    def close(self) -> None:
        """Releases what the source holds."""
