"""The seconds that the stages behind a search are expected to take: its reserve in the study's minutes.

The reserve is worked out anew whenever it is asked for, from the networks that have won so far and from what
their own trainings took; before any has, from five networks that take as long as the baseline. How the minutes
are divided:

- What is known beforehand comes off first: scores on validation for averages, scores on test, and the report.
- Confirmation has at most a quarter of the minutes, for up to five seeds of all winners. If that is not enough
  for two, as many winners are confirmed as it is enough for, the best first; if it is not enough for the best
  alone, nothing is kept, and the study says what there was no time for. A number of seeds that was asked for has
  half of the minutes at most; what it takes beyond that is done when they are over.
- Networks that learn from an average have what scoring and training them takes, 15 % of the minutes at most.
- Winners that are trained once more, on training and validation together, have what that takes, 8 % of the
  minutes at most; the best alone has what it takes, if it is from the confirmation, which comes after them.
- Trainings on all rows, after a search on a part of them, have what they take, half of the minutes at most.
- The search and tuning have the rest, in turns (`search.execution.budget`), and at least half of what is left
if
  the baseline's trainings and all that is known beforehand, or was asked for, have come off: if the others
  would have more of it, networks that learn have theirs first, then winners that are trained once more, then
  the confirmation. Without candidates there is nothing to teach and little to confirm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from search.config import StudyConfig
from search.execution.step_correction import StepCorrections
from search.study_state import StudyState
from trials.records.findings import MOST_WINNERS
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

# What trainings and scorings are expected to take, from the trainings of a study so far.
#
# Nothing is modelled: a network that was trained takes as long again, and a candidate that is not known yet as
# long as three in four of the latest ones at most. Both hold what a training takes beside its steps: its
# processes, its data, its evaluations.

LATEST = 20
"""Number of trainings that say what the next one takes: proposals grow larger or smaller as a search goes on."""
QUANTILE = 0.75
"""Share of the latest trainings that took no longer than is expected of the next."""


def expected_seconds(trials: Sequence[TrialRecord]) -> float:
    """Seconds that the next of such trainings is expected to take; 0 if none has taken any."""
    trained = (trial for trial in trials if trial.result.outcome is not Outcome.INFEASIBLE)
    took = [seconds for trial in trained if (seconds := trial.result.seconds or 0.0) > 0.0]
    latest = sorted(took[-LATEST:])
    return latest[math.ceil(QUANTILE * len(latest)) - 1] if latest else 0.0


def expected_by_plan(
    seconds_per_example: float, trials: Sequence[TrialRecord], corrections: StepCorrections | None = None
) -> float | None:
    """Seconds that a training is expected to take whose planned steps take so long per example: as many times as
    long as the middle one of the latest trainings by its own plan. None if no plan has a time."""
    took = [
        trial.result.whole_seconds / planned
        for trial in trials
        if trial.result.training_seconds > 0.0
        and (planned := planned_seconds(trial, corrections)) is not None
    ]
    return seconds_per_example * median(took[-LATEST:]) if took else None


def planned_seconds(trial: TrialRecord, corrections: StepCorrections | None = None) -> float | None:
    """Seconds per example of a trial's planned step, corrected by what is known now: plans of different times
    compare. None if its plan has no time."""
    step = trial.plan.step_seconds if corrections is None else corrections.seconds(trial)
    batch = trial.job.training.get("batch_size")
    return step / batch if step and batch else None


MOST_TAUGHT = 5
"""Largest number of networks that learn from an average."""
CONFIRM_SHARE = 0.25
"""Largest share of the minutes that is kept for as many seeds and winners as it allows."""
ASKED_SHARE = 0.5
"""Largest share of the minutes that is kept for a number of seeds that was asked for (`confirm=5`)."""
PROMOTION_SHARE = 0.5
"""Largest share of the minutes that is kept for trainings on all rows."""
SETTLED = 10
"""Number of candidates from which as many winners are expected as there are, and no longer five."""
DISTIL_SHARE = 0.15
"""Largest share of the minutes that is kept for networks that learn from an average."""
REFIT_SHARE = 0.08
"""Largest share of the minutes that is kept for training winners once more, on validation too."""
SEARCH_SHARE = 0.5
"""Least share for the search of what the baseline and the stages that are not optional leave of the minutes."""
CLOSING_SECONDS = 4.0
"""Seconds that the bundle of the best takes, and the end of the processes (docs/benchmarks/minutes.md); the report
and MLflow take on top what they took last."""
CLOSING_SHARE = 0.1
"""Largest share of the minutes that is kept for these: the first report of a study imports libraries, which on a
loaded machine takes long, and those that follow do not."""


class LaterStages:
    """What the stages behind the search of one study are expected to take."""

    def __init__(
        self, config: StudyConfig, state: StudyState, rows: Mapping[str, int], *, side_by_side: int
    ) -> None:
        """The stages of a study with `minutes`, whose trials train `side_by_side` on a log with so many `rows` by
        split."""
        assert config.minutes is not None
        self._config, self._state, self.places = config, state, side_by_side
        self._test_rows, self._train_rows = (
            rows[split] / max(1, rows["validation"]) for split in ("test", "train")
        )
        self._longer = 1.0 + 1.0 / max(1.0, self._train_rows) if config.refits else 1.0
        self.minutes_seconds = 60.0 * config.minutes
        self.train_examples = config.training.rows_used(rows["train"])
        """Number of examples of a pass."""

    def seconds(self) -> float:
        """Returns the seconds of all of them together: what a search leaves."""
        stages = (
            (self.distillation(), self._config.distil is True),
            (self.refits(), self._config.refit is True),
        )
        needed = self.promotions() + self.choosing() + self.scores() + self.closing
        needed += self._config.origins * self.one_seed() + sum(seconds for seconds, asked in stages if asked)
        if self._seeds_were_asked_for:
            needed += self.least_confirmation()
        left = (1.0 - SEARCH_SHARE) * max(0.0, self.minutes_seconds - self._baseline() - needed)
        learning = min(left, sum(seconds for seconds, asked in stages if not asked))
        return needed + learning + self.confirmation(left - learning)

    @property
    def closing(self) -> float:
        """Seconds after the last training: the bundle of the best, the report, MLflow."""
        return min(CLOSING_SECONDS + self._state.report_seconds, CLOSING_SHARE * self.minutes_seconds)

    def promotions(self) -> float:
        """Seconds that the front and the baseline take on all rows, as far as they have not had all rows."""
        fraction, promoted = self._config.training.train_fraction, self._state.promoted
        ended = [trial for trial in promoted if not trial.result.outcome.unfinished]
        if fraction >= 1.0:
            return 0.0
        had = {trial.origin.promoted_from for trial in ended}
        all_ended = any(trial.kind is TrialKind.BASELINE for trial in ended)  # it is the last
        # then those that have won since are what is left
        networks = self._state.searched.networks if all_ended else self._networks()
        took = (trial.result.training_seconds / fraction for trial in networks if trial.number not in had)
        return min(self._in_places(took), PROMOTION_SHARE * self.minutes_seconds)

    def choosing(self) -> float:
        """Seconds until all networks that averages may have, and the best is chosen from, are scored on
        validation."""
        networks = (*self._networks(), *self._state.selection.runners_up)
        return self._in_places(self._scored(networks, 1.0))

    def distillation(self) -> float:
        """Seconds that are kept for networks that learn from an average."""
        config, networks = self._config, self._state.selection.networks
        if not config.distils:
            return 0.0
        trained = self._in_places(trial.result.training_seconds for trial in networks[-MOST_TAUGHT:])
        seconds = self.scored_on_train(networks[-config.most_averaged :]) + trained
        return min(seconds, self.most_distillation)

    @property
    def most_distillation(self) -> float:
        """Largest number of seconds that networks which learn take from the stages behind them."""
        return DISTIL_SHARE * self.minutes_seconds

    def scored_on_train(self, networks: Iterable[TrialRecord]) -> float:
        """Seconds until these networks are scored on the training rows."""
        return self._in_places(self._scored(networks, self._train_rows))

    def scores(self) -> float:
        """Seconds until the winners are scored on test."""
        return self._in_places(self._scored(self._networks(), self._test_rows))

    def refits(self) -> float:
        """Returns the seconds until the winners and the baseline are trained once more, on validation too, and
        scored: within their share, but of the best network whatever it takes."""
        if not self._config.refits:
            return 0.0
        best = self._beside_baseline(self._state.selection.networks[-1:])
        return min(self.one_seed(), max(best, self.most_refits))

    @property
    def most_refits(self) -> float:
        """Largest number of seconds that winners which are trained once more, but for the best, take from their
        confirmation."""
        return REFIT_SHARE * self.minutes_seconds

    def one_seed(self) -> float:
        """Seconds until the winners and the baseline are retrained from one seed and scored, in the search."""
        networks = self._networks()
        most = min(1.0, (1 + MOST_WINNERS) / len(networks)) if networks else 0.0
        return most * self.retrained(networks)

    def retrained(self, networks: Iterable[TrialRecord]) -> float:
        """Seconds until these networks are retrained on all rows and scored on test."""
        networks = list(networks)
        whole = 1.0 if self._state.promoted else self._config.training.train_fraction
        scored = self._scored(networks, self._test_rows)
        took = (
            self._longer * trial.result.whole_seconds / whole + score
            for trial, score in zip(networks, scored, strict=True)
        )
        return self._in_places(took)

    @property
    def _seeds_were_asked_for(self) -> bool:
        """Tells whether the number of seeds is given, if only that there are none."""
        least, most = self._config.confirm_seeds
        return least == most

    def confirmation(self, within: float) -> float:
        """Returns the seconds, `within` so many, that are kept for confirming winners from a number of seeds that
        nobody asked for; 0 if they do not allow an interval."""
        if self._seeds_were_asked_for:
            return 0.0
        least, most = self._config.confirm_seeds
        one = self.one_seed()
        share = min(within, CONFIRM_SHARE * self.minutes_seconds)
        if least * one <= share:
            return min(most, int(share / one)) * one if one > 0.0 else 0.0
        return share if self.least_confirmation() <= share else 0.0

    def least_confirmation(self) -> float:
        """Returns the seconds that a confirmation takes at the least: of the best from the two seeds that an
        interval needs, or of all winners from as many as were asked for."""
        least, _ = self._config.confirm_seeds
        if self._seeds_were_asked_for:
            return min(least * self.one_seed(), ASKED_SHARE * self.minutes_seconds)
        front = self._state.selection.front
        if front and front[-1].kind is TrialKind.AVERAGE:
            best = self._state.networks(front[-1])
        else:  # averages are made later, and the best is one network more often than not
            best = tuple(self._state.selection.networks[-1:])
        return least * self._beside_baseline(best)

    def _beside_baseline(self, networks: Iterable[TrialRecord]) -> float:
        """Returns the seconds until the baseline and these networks are retrained from one seed and scored."""
        baseline = self._state.selection.baseline
        return self.retrained((*([baseline] if baseline else []), *networks))

    def _baseline(self) -> float:
        """Returns the seconds that the baseline's trainings in this study have taken, side by side."""
        trained = (trial for trial in self._state.trials.values() if trial.kind is TrialKind.BASELINE)
        took = (
            trial.result.training_seconds
            for trial in trained
            if not trial.shared and trial.origin.promoted_from is None
        )
        return self._in_places(took)

    def _scored(self, networks: Iterable[TrialRecord], rows: float) -> list[float]:
        """Seconds of scoring each network on `rows` times as many rows as validation has."""
        # processes take to start and to end what a training took beside its work at the least
        process = min(
            (
                max(0.0, (trial.result.seconds or 0.0) - trial.result.measured.whole_seconds)
                for trial in self._state.completed
                if trial.result.measured.whole_seconds > 0.0 and not trial.shared
            ),
            default=0.0,
        )
        took = []
        for trial in networks:
            evaluations, measured = len(trial.result.curve), trial.result.measured
            scoring = rows * (measured.evaluate_seconds or 0.0) / evaluations if evaluations else 0.0
            took.append(process + scoring)
        return took

    def _in_places(self, seconds: Iterable[float]) -> float:
        """Seconds that activities of these lengths take side by side (Graham's bound is a third above it)."""
        each = list(seconds)
        return max(max(each, default=0.0), sum(each) / self.places)

    def _networks(self) -> list[TrialRecord]:
        """The baseline and the networks of the winners so far; while there are few candidates, five more like the
        middle one of them at most."""
        state = self._state
        known = list(state.selection.trained)
        if len(state.candidates) >= SETTLED:
            return known
        like = [trial for trial in known if trial.kind is TrialKind.BASELINE] or state.completed[-1:]
        if state.candidates:
            trained = [trial for trial in state.candidates if trial.result.training_seconds > 0.0] or like
            like = sorted(trained, key=lambda trial: trial.result.training_seconds)[len(trained) // 2 :][:1]
        return known + like * (1 + MOST_WINNERS - len(known))


def candidate_seconds(state: StudyState) -> float:
    """Seconds that the next candidate is expected to take: as the latest ones; before any, as the baseline."""
    return expected_seconds(state.candidates) or expected_seconds(state.completed)
