"""Jobs that other studies have finished: found in a shared ledger, with their weights where those still lie.

A result needs no weights. A candidate that is to be exported does: its weights are copied from the other study's
directory if the very file is still there; if not, the job is trained here after all (`search.study.driver`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from search.run_directory import trial_folder
from trials.events import WEIGHTS
from trials.record import Origin, TrialRecord
from trials.storage.ledger import Ledger, Setting
from trials.storage.shared_ledger import SharedLedger, Stamp

COPIED_AT_ONCE_BYTES = 2**20


class Reuse:
    """One study's side of a shared ledger."""

    def __init__(self, url: str, own: Ledger, key: str, setting: Setting) -> None:
        """See `SharedLedger`."""
        self._shared = SharedLedger(url, own, key, setting)
        self._directory = Path(setting.directory)
        self._published = self._shared.published()

    def close(self) -> None:
        """Releases the shared ledger."""
        self._shared.close()

    def publish(self, record: TrialRecord) -> None:
        """Lets others find what was trained here."""
        weights = trial_folder(self._directory, record.number) / WEIGHTS
        self._shared.publish(record, weights)
        self._published.add(record.number)

    def publish_missing(self, records: list[TrialRecord]) -> None:
        """What had ended and was not published before the driver was gone."""
        for record in records:
            if record.number not in self._published:
                self.publish(record)

    def result(self, record: TrialRecord) -> TrialRecord | None:
        """The record of a trial that is about to start with the result of another study, if one has it.

        Of several, one whose weights are still there. Its plan stays its own: it is for this study's cluster.
        """
        found = self._shared.finished(record.fingerprint)
        if not found:
            return None
        known, origin = next((each for each in found if self._weights(each[1])), found[0])
        return with_result(record, known).replace(reused_from_study=origin, seconds=0.0)

    def fetch_weights(self, record: TrialRecord) -> bool:
        """Copies the weights of a result from where it was trained; whether they are here now."""
        origin = record.reused_from_study
        source = self._weights(origin) if origin else None
        if origin is None or source is None:
            return False
        target = trial_folder(self._directory, record.number) / WEIGHTS
        return copy_weights(source, self._shared.weights_stamp(origin), target)

    def _weights(self, origin: Origin) -> Path | None:
        """The file that the training left, if it is still that one."""
        path = trial_folder(Path(origin.directory), origin.trial) / WEIGHTS
        try:
            return path if Stamp.of(path.stat()) == self._shared.weights_stamp(origin) else None
        except OSError:
            return None


def copy_weights(source: Path, stamp: Stamp | None, target: Path) -> bool:
    """Copies a file of another study, if it is still the one with this stamp; whether it is here now."""
    copy = target.with_name(f"{WEIGHTS}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as opened, copy.open("wb") as file:
            if Stamp.of(os.fstat(opened.fileno())) == stamp:
                shutil.copyfileobj(opened, file, COPIED_AT_ONCE_BYTES)
                os.replace(copy, target)
                return True
    except OSError:  # that study has just found a better one, or its directory is out of reach
        pass
    copy.unlink(missing_ok=True)
    return False


RESULT = (
    "outcome",
    "curve",
    "validation",
    "examples_per_second",
    "step_ms",
    "peak_memory_bytes",
    "train_seconds",
    "evaluate_seconds",
    "executed_technique",
)
"""Of a record: what its training has brought."""


def with_result(record: TrialRecord, known: TrialRecord) -> TrialRecord:
    """A trial that has not begun, with what the training of an equal job has brought."""
    return record.replace(**({name: getattr(known, name) for name in RESULT}))
