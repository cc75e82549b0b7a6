"""Brings the report, MLflow and Optuna's mirror up to date while a study goes on, in a thread of its own.

They take time that grows with the number of trials, so they follow the study at a distance: after each
writing there is a pause of many times its duration. At the end, and when a study is interrupted, they
are brought fully up to date, and the best of a finished study is registered as a model. The ledger is the
truth meanwhile; nothing here is needed to resume.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from dashboards.report.page import write_report
from dhen.errors import UserError
from search.config import StudyConfig
from search.mlflow.fill_in import StudyRuns
from search.run_directory import REPORT
from search.study.drivers import POLL_SECONDS, Sharing
from search.study.optuna_mirror import OptunaMirror
from search.study_state import StudyState
from trials.records.study_record import StudyRecord

PAUSE_SECONDS = 2.0
PAUSE_RATIO = 10.0
"""Least duration of a pause over that of the writing before; a pause also takes at least `PAUSE_SECONDS`."""


class ReportWriter:
    """An observer of a study that writes its report, its MLflow runs and its mirror in Optuna; an error of the
    report alone ends the study."""

    def __init__(self, directory: Path, config: StudyConfig, console: Console) -> None:
        self._directory, self._config, self._console = directory, config, console
        self.sharing: Sharing | None = None
        """This driver's share in the study, of whose drivers one at a time writes; None if there is one."""
        self._on_duty = False
        self._asks_at = 0.0
        self._mlflow = StudyRuns(directory, config, console)
        self._mirror = OptunaMirror(config.optuna) if config.optuna is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report-writer")
        self._writing: Future[None] | None = None
        self._due = self._took = 0.0
        self._changes = 0
        self._trouble = ""

    def __call__(self, study: StudyState) -> None:
        """Begins to write if something is new, the pause is over, and the end (`finish`) is not there yet.

        Raises:
            OSError: when the report could not be written the last time.
        """
        study.report_seconds = self._took
        if self._writing is not None and not self._writing.done():
            return
        self._settle()
        sharing = self.sharing
        if sharing is not None:
            # one driver at a time writes; that is left to the one that does the study's end
            if sharing.led_elsewhere:
                self._leave_duty(sharing)
            elif not self._on_duty and time.monotonic() >= self._asks_at:
                self._asks_at = time.monotonic() + PAUSE_SECONDS
                self._on_duty = sharing.take_report()
        if (sharing is not None and not self._on_duty) or study.finished:
            return
        if study.ended and study.changes != self._changes and time.monotonic() >= self._due:
            self._changes = study.changes
            self._writing = self._thread.submit(self._write, study.record())

    def finish(self, record: StudyRecord) -> None:
        """Writes what the study has come to, unless another driver does; returns when it is written.

        Raises:
            OSError: when the report cannot be written.
        """
        self._settle()
        if self.sharing is not None and not self._takes_duty(self.sharing):
            self._thread.shutdown()
            return
        self._writing = self._thread.submit(self._write, record, last=True)
        try:
            self._settle()
        finally:
            self._thread.shutdown()
            if self._mirror is not None:
                self._mirror.close()

    def _takes_duty(self, sharing: Sharing) -> bool:
        """Whether this driver writes the end, as the one that leads or the last; waits until no other writes."""
        try:
            if not sharing.leads and (sharing.led_elsewhere or sharing.others):
                self._leave_duty(sharing)
                return False
            while not (self._on_duty or sharing.take_report()):
                time.sleep(POLL_SECONDS)
                sharing.sync()
        except (
            UserError
        ):  # the database's trouble, or that this driver is taken for dead, is said where it ends
            return self._on_duty
        return True

    def _leave_duty(self, sharing: Sharing) -> None:
        if self._on_duty:
            self._on_duty = False
            # what the next driver writes is not in what was read of MLflow, nor of Optuna's storage
            self._mlflow = StudyRuns(self._directory, self._config, self._console)
            if self._mirror is not None:
                self._thread.submit(self._mirror.close)
            sharing.leave_report()

    def _settle(self) -> None:
        """Waits for a writing under way; raises the error that it ended with."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, record: StudyRecord, *, last: bool = False) -> None:
        """Writes all of them, in the thread that alone uses MLflow and the mirror."""
        began = time.monotonic()
        write_report(record, self._directory / REPORT)
        if self._mirror is not None:
            try:
                self._mirror.sync(record)
            except UserError as error:  # the trouble is reported once, and ends nothing
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    warning = f"warning: Optuna is behind: {error}"
                    self._console.print(warning, style="yellow", soft_wrap=True, markup=False)
        written = time.monotonic()
        synced = self._mlflow.follow(record, at_once=last)
        if last and synced:
            self._mlflow.register_best(record)
        ended = time.monotonic()
        self._took = ended - began
        # the report does not wait for an MLflow that is away
        work = self._took if synced else written - began
        self._due = ended + max(PAUSE_SECONDS, PAUSE_RATIO * work)
