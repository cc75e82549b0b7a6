"""Weights in a run directory: of the trials that may be exported, alone or in an average."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from search.execution.trainer import CHECKPOINTS, Trainer
from search.reuse.elsewhere import Elsewhere
from search.study_state import Standing
from trials.events import WEIGHTS
from trials.record import TrialRecord
from trials.training.score_weights import logits_file


class KeptWeights:
    """Those of one study."""

    def __init__(self, trainer: Trainer, standing: Standing, elsewhere: Elsewhere) -> None:
        self._trainer, self._standing, self._elsewhere = trainer, standing, elsewhere
        self._there = set(standing.trials)

    def has(self, trial: TrialRecord) -> bool:
        """Whether a trial's weights are here; fetched now, where another study has them."""
        file, owner = self.file(trial), self._standing.trials[trial.owner]
        return file.exists() or self._elsewhere.fetch_weights(owner, file)

    def file(self, trial: TrialRecord) -> Path:
        """Of a trial, or of the one whose result it shares."""
        return self._trainer.folder(trial.owner) / WEIGHTS

    def logits(self, trial: TrialRecord, split: str) -> Path:
        """The file of what these weights gave on a split, if they were scored with `keep_logits`."""
        return logits_file(self._trainer.folder(trial.owner), split)

    def have_logits(self, trial: TrialRecord, split: str) -> bool:
        """Whether it is there, and no older than the weights."""
        logits, weights = self.logits(trial, split), self.file(trial)
        return logits.exists() and logits.stat().st_mtime_ns >= weights.stat().st_mtime_ns

    def keep(self, ended: TrialRecord) -> None:
        """Of a trial that may be exported: fetched where another study has trained it."""
        if ended.reused_from_study is not None and ended in self._standing.verdict.kept:
            self.has(ended)  # now, before that study drops them or is deleted
        shutil.rmtree(self._trainer.folder(ended.number) / CHECKPOINTS, ignore_errors=True)
        self._there.add(ended.number)

    def drop(self, running: Collection[int] | None = None) -> None:
        """What is not wanted any more; of a search that goes on, running trials and those on all rows stay."""
        whole = self._standing.promoted if running is not None else []
        kept = {trial.owner for trial in (*self._standing.verdict.kept, *whole)}
        for number in self._there - kept - set(running or ()):
            (self._trainer.folder(number) / WEIGHTS).unlink(missing_ok=True)
        self._there = kept
