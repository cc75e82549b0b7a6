"""Turns of search and tuning: whose turn it is follows from what the latest turns of each have gained per
second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

from trials.record import Outcome, TrialRecord

TURNS = 4
"""Number of latest turns of each that count: long enough that one lucky candidate is not all, short enough that
what was gained early is forgotten."""
TUNED_ARCHITECTURES = 3
"""Number of best architectures that are tuned in turn: an assumption, not measured."""


def untuned(candidates: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Candidates of the search itself."""
    return [trial for trial in candidates if trial.origin.tuned_from is None]


def tuned(candidates: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Candidates that tune an architecture of another one."""
    return [trial for trial in candidates if trial.origin.tuned_from is not None]


def last_turn(candidates: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The latest candidates that are all of the search, or all of tuning; the latest comes first."""
    tuning = candidates[-1].origin.tuned_from is not None
    return list(
        takewhile(lambda trial: (trial.origin.tuned_from is not None) == tuning, reversed(candidates))
    )


def tuning_gains_more(candidates: Sequence[TrialRecord], turn: int) -> bool:
    """Whether the latest turns of tuning, of so many candidates each, have lowered the best NE by more per second
    than those of the search. Where both have gained as much, most often nothing, it is the turn of the one whose
    last turn is longer ago."""
    gains, best = dict[int, float](), math.inf
    for trial in candidates:
        ne = _ne(trial)
        gains[trial.number] = max(0.0, best - ne) if math.isfinite(best) else 0.0
        best = min(best, ne)

    def per_second(trials: list[TrialRecord]) -> float:
        latest = trials[-TURNS * turn :]
        seconds = sum(trial.result.seconds or 0.0 for trial in latest)
        return sum(gains[trial.number] for trial in latest) / seconds if seconds > 0.0 else 0.0

    search, tuning = per_second(untuned(candidates)), per_second(tuned(candidates))
    return tuning > search if tuning != search else candidates[-1].origin.tuned_from is None


def _ne(trial: TrialRecord) -> float:
    """NE on validation of a candidate that completed; infinite for others."""
    if trial.result.outcome is not Outcome.COMPLETED or trial.result.validation is None:
        return math.inf
    ne = trial.result.validation.ne
    return ne if math.isfinite(ne) else math.inf
