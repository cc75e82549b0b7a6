"""Jobs that other studies have finished: found in a shared ledger, with their weights where those still lie.

A result needs no weights. A candidate that is to be exported does: its weights are copied from the other study's
directory if the very file is still there; if not, the job is trained here after all (`search.study.driver`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dhen.atomic_write import atomic_file
from search.run_directory import trial_folder
from trials.events import WEIGHTS
from trials.record import StudyTrial, TrialRecord
from trials.storage.ledger import Ledger, Setting
from trials.storage.shared_ledger import FileStamp, SharedLedger

COPIED_AT_ONCE_BYTES = 2**20


class SharedResults:
    """One study's side of a shared ledger: a `search.reuse.result_source.ResultSource`."""

    def __init__(self, url: str, own: Ledger, key: str, setting: Setting) -> None:
        """Opens the shared ledger.

        Args:
            url: URL of the shared ledger.
            own: the study's own ledger.
            key: the study's name in the shared ledger.
            setting: what the study's trials have in common.

        Raises:
            UserError: when the database cannot be used.
        """
        self._shared = SharedLedger(url, own, key, setting)
        self._directory = Path(setting.directory)
        self._published = self._shared.published()

    def close(self) -> None:
        """Releases the shared ledger."""
        self._shared.close()

    def publish(self, record: TrialRecord) -> None:
        """Lets other studies find what was trained here to its end; a result taken over is found in the study that
        trained it."""
        if not record.attempts or record.result.measured.cut_after is not None:
            return
        weights = trial_folder(self._directory, record.number) / WEIGHTS
        self._shared.publish(record, weights)
        self._published.add(record.number)

    def publish_missing(self, records: list[TrialRecord]) -> None:
        """Publishes trials that had ended and were not published before the driver was gone."""
        for record in records:
            if record.number not in self._published:
                self.publish(record)

    def result(self, record: TrialRecord) -> TrialRecord | None:
        """The record of a trial that is about to start with the result of another study, if one has it.

        Of several results, one whose weights are still there is taken. The plan stays the trial's own: it is for
        this study's cluster.
        """
        finished = self._shared.finished(record.job.fingerprint)
        if not finished:
            return None
        trained, origin = next((pair for pair in finished if self._weights(pair[1])), finished[0])
        return record.with_result_of(trained, reused_from_study=origin)

    def fetch_weights(self, record: TrialRecord, target: Path) -> bool:
        """Copies the weights of a result from where it was trained; says whether they are here now."""
        origin = record.origin.reused_from_study
        source = self._weights(origin) if origin else None
        if origin is None or source is None:
            return False
        return copy_weights(source, self._shared.weights_stamp(origin), target)

    def _weights(self, origin: StudyTrial) -> Path | None:
        """The weights file that the training left, if it has not changed since."""
        path = trial_folder(Path(origin.directory), origin.trial) / WEIGHTS
        try:
            return path if FileStamp.of(path.stat()) == self._shared.weights_stamp(origin) else None
        except OSError:
            return None


def copy_weights(source: Path, stamp: FileStamp | None, target: Path) -> bool:
    """Copies a file of another study, if it still has this stamp; says whether it is here now."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as opened:
            # the stamp of the opened file, not of the path, which may be replaced at any moment
            if FileStamp.of(os.fstat(opened.fileno())) != stamp:
                return False
            with atomic_file(target) as copy, copy.open("wb") as file:
                shutil.copyfileobj(opened, file, COPIED_AT_ONCE_BYTES)
    except OSError:  # that study has just found a better one, or its directory is out of reach
        return False
    return True
