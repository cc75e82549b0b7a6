"""Weights in a run directory: of the trials that may be exported, alone or in an average."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from search.reuse.warm_start import WarmStart
from search.run_directory import CHECKPOINTS, folder_of, trial_folder
from search.study_state import StudyState
from trials.events import WEIGHTS, logits_file
from trials.record import TrialKind, TrialRecord


class KeptWeights:
    """The weights of one study's trials."""

    def __init__(self, directory: Path, state: StudyState, warm_start: WarmStart) -> None:
        """Weights in a run directory; `warm_start` has the weights of results that were taken over."""
        self._directory, self._state, self._warm_start = directory, state, warm_start
        self._with_weights = set(state.trials)

    def has(self, network: TrialRecord) -> bool:
        """Whether a network's weights are here; fetched now, where another study has them."""
        file = self.file(network)
        if file.exists() or network.kind is TrialKind.RETRAINING:
            return file.exists()
        owner = self._state.trials[network.owner]
        return self._warm_start.fetch_weights(owner, file)

    def file(self, network: TrialRecord) -> Path:
        """The weights file of a trial, of the trial whose result it shares, or of a retraining."""
        return folder_of(self._directory, network) / WEIGHTS

    def logits(self, network: TrialRecord, split: str) -> Path:
        """The file of a network's logits on a split, if it was scored there with `keep_logits`."""
        return logits_file(folder_of(self._directory, network), split)

    def have_logits(self, network: TrialRecord, split: str) -> bool:
        """Whether the file of logits is there, and no older than the weights."""
        logits, weights = self.logits(network, split), self.file(network)
        return logits.exists() and logits.stat().st_mtime_ns >= weights.stat().st_mtime_ns

    def keep(self, trial: TrialRecord) -> None:
        """Takes in a trial that has ended: fetches its weights, where it may be exported and another study
        has them."""
        if trial.origin.reused_from_study is not None and trial in self._state.selection.kept:
            self.has(trial)  # now, before that study drops them or is deleted
        shutil.rmtree(trial_folder(self._directory, trial.number) / CHECKPOINTS, ignore_errors=True)
        self.note(trial)

    def note(self, trial: TrialRecord) -> None:
        """Knows of a trial that has ended, whoever has trained it."""
        self._with_weights.add(trial.number)

    def drop(self, running: Collection[int] | None = None) -> None:
        """Drops weights that are not wanted any more; in a search that goes on, running trials and trials on all
        rows keep theirs."""
        promoted = self._state.promoted if running is not None else []
        kept = {trial.owner for trial in (*self._state.selection.kept, *promoted)}
        for number in self._with_weights - kept - self._state.unfinished - set(running or ()):
            (trial_folder(self._directory, number) / WEIGHTS).unlink(missing_ok=True)
        self._with_weights = kept
