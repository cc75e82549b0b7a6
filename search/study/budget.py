"""How much a study may still do: candidates of the search, candidates of the tuning stage, minutes."""

from __future__ import annotations

from search.config import StudyConfig
from search.study.retune import untuned
from search.study_state import StudyState

NOTHING_NEW = 100
"""Number of proposals in a row that needed no training, after which a study without a number of trials ends."""


class Budget:
    """The part of a study's budget that its trials have left."""

    def __init__(self, config: StudyConfig, state: StudyState, *, spent: bool) -> None:
        """A budget; `spent` says that the study came to its end with these settings, whatever they would leave."""
        self._config, self._state, self._spent = config, state, spent

    def search_is_over(self, fruitless: int) -> bool:
        """Whether no further candidate is proposed, after `fruitless` proposals in a row needed no training."""
        trials = self._config.most_trials
        if self._spent:
            return True
        if trials is not None and len(untuned(self._state.candidates)) >= trials:
            return True
        if self._over(reserved_seconds=self._tuning_seconds()):
            return True
        return trials is None and fruitless >= NOTHING_NEW

    def tuning_is_over(self) -> bool:
        """Whether no further candidate tunes one of the best architectures."""
        return self._spent or not self._still_to_tune() or self._over()

    def _over(self, *, reserved_seconds: float = 0.0) -> bool:
        minutes = self._config.minutes
        return minutes is not None and (
            self._state.elapsed_seconds() >= 60.0 * minutes - min(reserved_seconds, 30.0 * minutes)
        )

    def _tuning_seconds(self) -> float:
        """Seconds that the tuning stage will take at the pace so far."""
        done = max(1, len(self._state.trials))
        return self._still_to_tune() * self._state.elapsed_seconds() / done

    def _still_to_tune(self) -> int:
        candidates = self._state.candidates
        return max(0, self._config.tune - (len(candidates) - len(untuned(candidates))))
