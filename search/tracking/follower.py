"""Keeps MLflow equal to a study that goes on, whatever becomes of MLflow meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from dhen.errors import UserError
from search.config import StudyConfig
from search.run_directory import BEST, REPORT
from search.tracking.destination import open_tracker, server_of
from trials.mlflow.tracker import Tracker
from trials.study_record import StudyRecord

RETRY_SECONDS = 20.0
"""Seconds after which a server that was in trouble is asked again."""


class MlflowFollower:
    """Writes a study to MLflow. Trouble is said once, and what was missed is written when it is over."""

    def __init__(self, directory: Path, config: StudyConfig, console: Console) -> None:
        self._directory, self._config, self._console = directory, config, console
        self._tracker: Tracker | None = None
        self._trouble = ""
        self._again_at = 0.0

    def sync(self, record: StudyRecord, *, at_once: bool = False) -> bool:
        """Makes MLflow agree with the record, and says whether it does now; `at_once` also soon after trouble."""
        if not at_once and time.monotonic() < self._again_at:
            return False
        try:
            self._tracker = self._tracker or open_tracker(self._directory, self._config)
            self._tracker.sync(record, report=self._directory / REPORT)
        except UserError as error:
            self._say(error)
            return False
        if self._trouble:
            self._trouble = ""
            self._console.print("MLflow is up to date again", soft_wrap=True)
        return True

    def register_best(self, record: StudyRecord) -> None:
        """Registers the bundle of the best as a model, where the study is finished and is to do so."""
        folder, tracker, best = self._directory / BEST, self._tracker, record.best
        wanted = self._config.register_model and record.finished and folder.is_dir()
        if not wanted or tracker is None or best is None:
            return
        from search.tracking.register import register_bundle  # late: it needs torch

        try:
            with tracker.errors():
                run = tracker.run_of(best)
                register_bundle(
                    tracker.client, folder, name=tracker.name, experiment=tracker.experiment, run=run
                )
        except UserError as error:
            self._say(error)

    def _say(self, error: UserError) -> None:
        self._again_at = time.monotonic() + RETRY_SECONDS
        if str(error) == self._trouble:
            return
        self._trouble = str(error)
        later = ""
        if server_of(self._config):
            later = (
                " The study goes on; MLflow is brought up to date when it answers again, at the latest by "
                f"the next `dhen-search run --out {self._directory}` or `dhen-search report {self._directory}`."
            )
        warning = f"warning: MLflow is behind: {error}{later}"
        self._console.print(warning, style="yellow", soft_wrap=True, markup=False)
