"""How many passes over the training rows a study's trainings have, where `training.epochs` is `auto`.

Models with id embeddings commonly overfit from the second pass on (arXiv 2209.06053); where ids recur often, more
passes can be worth more than any architecture. Which log is which only training shows, so the baseline's first two
trials find out: one pass, whose learning rates fall to zero within it, then as many as help, at constant rates. NE
often rises for a pass or two before it falls below that of the first one (docs/log.md), so the second trial ends
three passes after its best evaluation, and not earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spaces.space import Point
from trials.job import TrainingConfig
from trials.record import CurvePoint, Outcome, TrialRecord
from trials.study_record import FoundPasses, relative_ne_percent

EPOCHS = "training.epochs"
"""Name under which a point of the baseline has its number of passes."""
ONE_PASS: Point = {EPOCHS: 1}
"""The baseline's first trial, where passes are to be found."""
MOST_PASSES = 32
"""Largest number of passes that are tried."""
SHARE_OF_MINUTES = 0.25
"""Largest share of a study's minutes that the second trial may take."""
STALE_PASSES, EVALUATIONS_PER_PASS = 3, 2
"""Passes without a better NE after which the second trial ends, and evaluations in each by default."""
WORTH_PERCENT = 0.5
"""Decrease of NE in percent from which several passes are worth their time (chosen, not measured)."""
NEARLY = 0.05
"""Passes by which an evaluation may miss the end of a pass, since it waits for the end of a batch."""
SLACK = 1.5
"""Passes that candidates may have per pass that the baseline needed, since others may learn more slowly."""


class Passes:
    """How many passes the trainings of one study have."""

    def __init__(
        self, baseline: TrainingConfig, *, minutes: float | None, found: FoundPasses | None = None
    ) -> None:
        """The passes of one study.

        Args:
            baseline: how the baseline trains, with what is left open.
            minutes: the study's budget; None for no limit.
            found: what is known so far; None where it is to be found.
        """
        self._baseline, self._minutes = baseline, minutes
        self.found = found
        """The number of passes; None before it is found."""

    def applied(self, training: TrainingConfig) -> TrainingConfig:
        """Training settings with a number of passes: the one they have, or the one found, or 1 before that."""
        if training.epochs != "auto":
            return training
        return training.replace(epochs=self.found.passes if self.found is not None else 1)

    def find(self, trials: Mapping[int, TrialRecord], train: Callable[[int, Point], None]) -> None:
        """Finds the number of passes by the baseline's first two trials.

        Args:
            trials: the study's trials, by number, as they become known.
            train: trains the baseline at a point as the trial of a number, unless that has ended.
        """
        train(0, ONE_PASS)
        # an interrupted study goes on with the number of passes that it had begun with
        point = trials[1].point if 1 in trials else self._several(trials[0])
        if point is None:
            share = f"{SHARE_OF_MINUTES:.0%} of the study's {self._minutes:g} minutes"
            self.found = FoundPasses(passes=1, reason=f"two of the baseline would take more than {share}")
            return
        train(1, point)
        self.found = found_passes(trials[0], trials[1])

    def _several(self, one_pass: TrialRecord) -> Point | None:
        """The point of the second trial, by how long the first took; None where two passes would take too
        long."""
        # a result of another study took no time here, but its measurements say what a training takes
        seconds = max(one_pass.result.seconds or 0.0, one_pass.result.measured.whole_seconds)
        most = MOST_PASSES
        if self._minutes is not None and seconds > 0.0:
            most = min(most, int(SHARE_OF_MINUTES * 60.0 * self._minutes / seconds))
        if most < 2:
            return None
        settings = many_passes(self._baseline, most, len(one_pass.result.curve))
        return {f"training.{key}": value for key, value in settings.items()}


def many_passes(training: TrainingConfig, most: int, evaluations: int) -> dict[str, Any]:
    """Settings of a training with as many passes as help, at most so many: a constant rate and a long patience,
    unless `training` says otherwise.

    `evaluations` is the number of those in one pass, which counts where `training` says how far they are apart.
    """
    per_pass = EVALUATIONS_PER_PASS if training.evaluate_every is None else max(1, evaluations)
    settings: dict[str, Any] = {"epochs": most}
    if training.schedule == "auto":
        settings["schedule"] = "constant"
    if training.patience is None:
        settings["patience"] = STALE_PASSES * per_pass
    return settings


def found_passes(one_pass: TrialRecord, several: TrialRecord) -> FoundPasses:
    """What the baseline's first two trials have shown; both have ended."""
    if several.result.outcome is not Outcome.COMPLETED:
        return FoundPasses(
            passes=1, reason=f"the baseline's training with more ended as {several.result.outcome}"
        )
    curve = [point for point in several.result.curve if math.isfinite(point.validation.ne)]
    lowest = min(curve, key=_ne)
    first = min(
        (
            *(_ne(point) for point in curve if point.epoch < 1.0 + NEARLY),
            *(_ne(point) for point in one_pass.result.curve if math.isfinite(_ne(point))),
        ),
        default=math.inf,
    )
    worth = relative_ne_percent(lowest.validation.ne, first) <= -WORTH_PERCENT
    return FoundPasses(
        passes=math.ceil(SLACK * (lowest.epoch - NEARLY)) if worth else 1,
        tried=several.job.training["epochs"],
        first_ne=first if math.isfinite(first) else None,
        lowest_ne=lowest.validation.ne,
        lowest_after=lowest.epoch,
    )


def known_passes(trials: Iterable[TrialRecord], reason: str) -> FoundPasses | None:
    """The number of passes that trials of the space have had, where they had one; for the `reason`."""
    numbers = [epochs for trial in trials if (epochs := trial.job.training.get("epochs")) is not None]
    return FoundPasses(passes=max(numbers), reason=reason) if numbers else None


def _ne(point: CurvePoint) -> float:
    return point.validation.ne
