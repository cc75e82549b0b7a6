"""Brings the report, MLflow and Optuna's mirror up to date while a study goes on, in a thread of its own.

They take time that grows with the number of trials, so they follow the study at a distance: after each
writing there is a pause of many times its duration. At the end, and when a study is interrupted, they
are brought fully up to date. The ledger is the truth meanwhile; nothing here is needed to resume.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dashboards.names import trial_name
from dashboards.report.page import write_report
from dhen.errors import UserError
from search.optuna.mirror import OptunaMirror
from search.run_directory import REPORT
from search.study_state import StudyState
from trials.mlflow.tracker import Tracker
from trials.study_record import StudyRecord

PAUSE_SECONDS = 2.0
PAUSE_RATIO = 10.0
"""Least duration of a pause over that of the writing before; a pause also takes at least `PAUSE_SECONDS`."""


class ReportWriter:
    """An observer of a study that writes its report, its MLflow runs and its mirror in Optuna; an error of the
    report alone ends the study."""

    def __init__(self, directory: Path, console: Console, *, optuna: str | None = None) -> None:
        """A writer that has written nothing yet.

        Args:
            directory: the study's run directory.
            console: where trouble is told.
            optuna: the storage of Optuna in which the study stands too (`optuna=`); None for none.
        """
        self._directory, self._console = directory, console
        self._mirror = OptunaMirror(optuna) if optuna is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report-writer")
        self._writing: Future[None] | None = None
        self._due = self._took = 0.0
        self._changes = 0
        self._tracker: Tracker | None = None
        self._troubles: set[str] = set()

    def __call__(self, study: StudyState) -> None:
        """Begins to write where something is new, the pause is over, and the end (`finish`) is not there yet.

        Raises:
            OSError: when the report could not be written the last time.
        """
        study.report_seconds = self._took
        if study.finished or (self._writing is not None and not self._writing.done()):
            return
        self._settle()
        if study.ended and study.changes != self._changes and time.monotonic() >= self._due:
            self._changes = study.changes
            self._writing = self._thread.submit(self._write, study.record())

    def finish(self, record: StudyRecord) -> None:
        """Writes what the study has come to; returns when it is written.

        Raises:
            OSError: when the report cannot be written.
        """
        self._settle()
        self._writing = self._thread.submit(self._write, record)
        try:
            self._settle()
        finally:
            self._thread.shutdown()
            if self._mirror is not None:
                self._mirror.close()

    def _settle(self) -> None:
        """Waits for a writing under way; raises the error that it ended with."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, record: StudyRecord) -> None:
        """Writes all of them, in the thread that alone uses the tracker and the mirror."""
        began = time.monotonic()
        write_report(record, self._directory / REPORT)
        with self._trouble_is_told("MLflow"):
            self._tracker = self._tracker or Tracker.open(self._directory, name_model=trial_name)
            self._tracker.sync(record, report=self._directory / REPORT)
        if self._mirror is not None:
            with self._trouble_is_told("Optuna"):
                self._mirror.sync(record)
        ended = time.monotonic()
        self._took = ended - began
        self._due = ended + max(PAUSE_SECONDS, PAUSE_RATIO * self._took)

    @contextmanager
    def _trouble_is_told(self, what: str) -> Iterator[None]:
        """A context whose errors are said, each once, and end nothing."""
        try:
            yield
        except UserError as error:
            if str(error) not in self._troubles:
                self._troubles.add(str(error))
                self._console.print(
                    f"warning: {what} is behind: {error}", style="yellow", soft_wrap=True, markup=False
                )
