"""How many passes over the training rows a study's trainings have, if `training.epochs` is `auto`.

Models with id embeddings commonly overfit from the second pass on (arXiv 2209.06053); if ids recur often, more
passes can be worth more than any architecture. Which log is which only training shows, so the baseline's first
trials find out: one pass, whose learning rates fall to zero within it, then as many as help, at constant rates. NE
often rises for a pass or two before it falls below that of the first one (docs/log.md), so these end three passes
after their best evaluation, and not earlier. If several help, a further trial has as many as did, over which
learning rates fall to zero as half a cosine. If its NE is lowest a pass or more before its end, rare ids are
learnt by heart from there on, and one with as many passes follows: the lower rates are when that begins, the
better (docs/log.md). If NE is no higher than at constant rates, all trainings have falling ones.

With many passes embeddings decay, since networks else learn rare ids by heart before they learn what recurring
ones have in common. Decay by how often an id occurs, beside that of whole tables, is far better on some logs and
worse on others (docs/log.md), so there is a trial with it and one without; all trainings take over the better.
If a forced or needed technique excludes decay of whole tables, neither has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dhen.errors import UserError
from spaces.space import Point
from trials.planner.plan import Plan
from trials.records.job import Job, TrainingConfig
from trials.records.study_record import FoundPasses, StudyRecord, relative_ne_percent
from trials.records.trial_record import CurvePoint, Outcome, TrialRecord

EPOCHS = "training.epochs"
"""Name under which a point of the baseline has its number of passes."""
ONE_PASS: Point = {EPOCHS: 1}
"""The baseline's first trial, if passes are to be found."""
MOST_PASSES = 32
"""Largest number of passes that are tried."""
SHARE_OF_MINUTES = 0.15
"""Largest share of a study's minutes that each of the trials with many passes may take, and all of those together
whose learning rates fall."""
STALE_PASSES, EVALUATIONS_PER_PASS = 3, 2
"""Passes without a better NE after which such a trial ends, and evaluations in each by default."""
WORTH_PERCENT = 0.5
"""Decrease of NE in percent from which more passes are worth their time (chosen, not measured)."""
DECAYS: tuple[dict[str, float], ...] = (
    {"table_decay": 0.01},
    {"table_decay": 0.01, "frequency_decay": 0.1},
)
"""Decays of embeddings that trials with many passes have in turn, if the training has none of its own; the
last has all settings that there are."""
OF_TABLES = "table_decay"
"""The decay of whole tables, which some techniques exclude (`trials.planner.ladder`)."""
NEARLY = 0.05
"""Passes by which an evaluation may miss the end of a pass, since it waits for the end of a batch."""
SLACK = 1.5
"""Passes that candidates may have per pass that the baseline needed at constant rates, since others may learn more
slowly; if rates fall to zero, all have as many as it needed."""
FALLING: dict[str, Any] = {"schedule": "cosine"}
"""Settings of trainings with several passes over which learning rates fall."""
FEWEST_FALLING = 2
"""Smallest number of passes that such trainings are tried with; one pass is tried by the first trial."""


class PassFinder:
    """How many passes the trainings of one study have."""

    def __init__(
        self,
        baseline: TrainingConfig,
        *,
        minutes: float | None,
        found: FoundPasses | None = None,
        of_tables: bool = True,
    ) -> None:
        """The passes of one study.

        Args:
            baseline: how the baseline trains, with what is left open.
            minutes: the study's budget; None for no limit.
            found: what is known so far; None if it is to be found.
            of_tables: whether decay of whole tables may be tried.
        """
        self._baseline, self._minutes, self._of_tables = baseline, minutes, of_tables
        self.found = found
        """The number of passes; None before it is found."""

    def applied(self, training: TrainingConfig) -> TrainingConfig:
        """Training settings with a number of passes: the one they have, or the one found for their schedule, or 1
        before that."""
        if training.epochs != "auto":
            return training
        if self.found is None:
            return training.replace(epochs=1)
        if self.found.falling is None or training.schedule == "constant":
            return training.replace(epochs=self.found.passes)
        settings = FALLING if training.schedule == "auto" else {}
        return training.replace(epochs=self.found.falling, **settings)

    def find(self, trials: Mapping[int, TrialRecord], train: Callable[[Mapping[int, Point]], None]) -> None:
        """Finds the number of passes by the baseline's first trials.

        Args:
            trials: the study's trials, by number, as they become known.
            train: trains the baseline at points, as the trials of their numbers, unless these have ended.
        """
        train({0: ONE_PASS})
        points: dict[int, Point] = {}
        for number, decays in enumerate(open_decays(self._baseline, of_tables=self._of_tables), start=1):
            # an interrupted study goes on with the number of passes that it had begun with
            point = trials[number].point if number in trials else self._several(trials[0], decays)
            if point is None:
                share = f"{SHARE_OF_MINUTES:.0%} of the study's {self._minutes:g} minutes"
                self.found = FoundPasses(passes=1, reason=f"two of the baseline would take more than {share}")
                return
            points[number] = point
        train(points)
        self.found = found_passes(trials[0], [trials[number] for number in points])
        if self._baseline.schedule != "auto":
            return
        fallen: list[TrialRecord] = []
        while (passes := falling_passes(self.found, fallen)) is not None:
            made = sum(trial.result.training_seconds for trial in fallen if not trial.shared)
            seconds = made + passes * trials[0].result.training_seconds
            if fallen and self._minutes is not None and seconds > SHARE_OF_MINUTES * 60.0 * self._minutes:
                break  # it would take more than their share of the minutes: what the first ones have shown counts
            number = 1 + len(points) + len(fallen)
            settings = FALLING | {"epochs": passes} | self.found.decays
            train({number: {f"training.{key}": value for key, value in settings.items()}})
            fallen.append(trials[number])
        self.found = with_falling(self.found, fallen)

    def decayed(self, training: TrainingConfig) -> TrainingConfig:
        """Training settings with the decay of embeddings with which several passes helped, if they did and the
        settings have none."""
        if self.found is None or has_decay(training):
            return training
        return training.replace(**self.found.decays)

    def _several(self, one_pass: TrialRecord, decays: Mapping[str, float]) -> Point | None:
        """The point of a trial with many passes, by how long the first took; None if two passes would take
        too long."""
        # a result of another study took no time here, but its measurements say what a training takes
        seconds = one_pass.result.training_seconds
        most = MOST_PASSES
        if self._minutes is not None and seconds > 0.0:
            most = min(most, int(SHARE_OF_MINUTES * 60.0 * self._minutes / seconds))
        if most < 2:
            return None
        settings = many_passes(self._baseline, most, one_pass)
        return {f"training.{key}": value for key, value in (settings | dict(decays)).items()}


def open_decays(training: TrainingConfig, *, of_tables: bool = True) -> tuple[dict[str, float], ...]:
    """The decays that trainings with many passes try in turn: none if `training` sets one; that of whole tables
    only if `of_tables`."""
    if has_decay(training):
        return ({},)
    return tuple(decays if of_tables else without_tables(decays) for decays in DECAYS)


def without_tables(decays: Mapping[str, float]) -> dict[str, float]:
    """Returns decays without that of whole tables."""
    return {key: rate for key, rate in decays.items() if key != OF_TABLES}


def excludes_decay_of_tables(job: Job, plan: Callable[[Job], Plan]) -> str | None:
    """Returns the technique, forced or needed, that can hold a job without decay of whole tables while nothing can
    hold it with that; None if the decay may be tried, or nothing can hold the job in any case."""

    def technique(decay: float) -> str | None:
        try:
            chosen = plan(job.replace(training=job.training.replace(table_decay=decay))).chosen
        except UserError:  # the technique that is forced
            return None
        return None if chosen is None else chosen.held_as

    return None if technique(DECAYS[0][OF_TABLES]) is not None else technique(0.0)


def has_decay(training: TrainingConfig) -> bool:
    """Whether training settings have a decay of embeddings of their own."""
    return any(getattr(training, key) for key in DECAYS[-1])


def many_passes(training: TrainingConfig, most: int, one_pass: TrialRecord) -> dict[str, Any]:
    """Settings of a training with as many passes as help, at most so many: a constant rate and a long patience,
    unless `training` says otherwise.

    How many evaluations a pass has if `training` says how far they are apart is known from a training with one
    pass, which may have ended early.
    """
    per_pass, curve = EVALUATIONS_PER_PASS, one_pass.result.curve
    if training.evaluate_every is not None and curve:
        per_pass = max(1, round(len(curve) / curve[-1].epoch))
    settings: dict[str, Any] = {"epochs": most}
    if training.schedule == "auto":
        settings["schedule"] = "constant"
    if training.patience is None:
        settings["patience"] = STALE_PASSES * per_pass
    return settings


def found_passes(one_pass: TrialRecord, several: Sequence[TrialRecord]) -> FoundPasses:
    """What the baseline's first trials have shown: one with a single pass, and others with many; all have
    ended."""
    completed = [trial for trial in several if trial.result.outcome is Outcome.COMPLETED]
    if not completed:
        return FoundPasses(
            passes=1, reason=f"the baseline's training with more ended as {several[0].result.outcome}"
        )
    points = [(point, trial) for trial in completed for point in _curve(trial)]
    lowest, best = min(points, key=lambda each: _ne(each[0]))
    # within one pass its schedule counts, not how embeddings decay
    first = min(
        (
            *(_ne(point) for point, _ in points if point.epoch < 1.0 + NEARLY),
            *map(_ne, _curve(one_pass)),
        ),
        default=math.inf,
    )
    worth = relative_ne_percent(lowest.validation.ne, first) <= -WORTH_PERCENT
    return FoundPasses(
        passes=math.ceil(SLACK * (lowest.epoch - NEARLY)) if worth else 1,
        tried=best.job.training["epochs"],
        first_ne=first if math.isfinite(first) else None,
        lowest_ne=lowest.validation.ne,
        lowest_after=lowest.epoch,
        decays=_decays(best) if worth else {},
    )


def falling_passes(found: FoundPasses, fallen: Sequence[TrialRecord]) -> int | None:
    """Returns the number of passes of the next training whose learning rates fall, after those that have `fallen`:
    as many as helped at constant rates, then fewer for as long as NE was lowest before the end; None after the
    last, and after one that did not complete."""
    if not fallen:
        return _whole(found.lowest_after) if found.passes > 1 and found.lowest_after is not None else None
    if fallen[-1].result.outcome is not Outcome.COMPLETED:
        return None
    lowest = min(_curve(fallen[-1]), key=_ne, default=None)
    passes = fallen[-1].job.training["epochs"]
    fewer = passes if lowest is None else max(FEWEST_FALLING, _whole(lowest.epoch))
    return fewer if fewer < passes else None


def with_falling(found: FoundPasses, fallen: Sequence[TrialRecord]) -> FoundPasses:
    """Returns what was found, with the fewest passes over which learning rates fall whose NE is near the lowest,
    unless constant rates are better than all of them; trials that did not complete do not count."""
    completed = (trial for trial in fallen if trial.result.outcome is Outcome.COMPLETED)
    lowest = [(min(map(_ne, curve)), trial) for trial in completed if (curve := _curve(trial))]
    best = min((ne for ne, _ in lowest), default=math.inf)
    if found.lowest_ne is None or best > found.lowest_ne:
        return found
    near = min(found.lowest_ne, best * (1.0 + WORTH_PERCENT / 100.0))
    passes, ne = min((trial.job.training["epochs"], ne) for ne, trial in lowest if ne <= near)
    return found.replace(falling=passes, falling_ne=ne)


def _curve(trial: TrialRecord) -> list[CurvePoint]:
    return [point for point in trial.result.curve if math.isfinite(_ne(point))]


def _decays(trial: TrialRecord) -> dict[str, float]:
    """How a trial's embeddings decay."""
    training = trial.job.training
    return {key: float(training[key]) for key in DECAYS[-1] if training.get(key)}


def known_passes(study: StudyRecord, reason: str, *, schedule: str) -> FoundPasses | None:
    """Returns the number of passes that candidates of another study have had, if they had one, and how their
    embeddings decay, for trainings with this schedule of learning rates; for the `reason`."""
    trained = (trial.job.training.get("epochs") for trial in study.candidates)
    numbers = [epochs for epochs in trained if epochs is not None]
    found = study.passes
    if not numbers:
        return None
    if found is None:
        return FoundPasses(passes=max(numbers), reason=reason)
    passes = max(found.passes, *numbers)
    falling = found.falling if schedule != "constant" else None
    return FoundPasses(passes=passes, reason=reason, falling=falling, decays=found.decays)


def _whole(passes: float) -> int:
    """The number of whole passes that an evaluation after so many passes is in or at the end of."""
    return math.ceil(passes - NEARLY)


def _ne(point: CurvePoint) -> float:
    return point.validation.ne
