"""How much a study may still do: candidates of the search, candidates that tune the best of them, minutes.

If both search and tuning are open-ended they take turns: tuning has its first turn when half of the time
for candidates is over, and from then on the next turn is of whichever has lowered the best NE by more per
second in its latest turns.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from statistics import median

from dashboards.names import duration
from search.config import StudyConfig
from search.execution.later_stages import (
    LaterStages,
    candidate_seconds,
    expected_by_plan,
    expected_seconds,
    planned_seconds,
)
from search.execution.step_correction import StepCorrections
from search.selection import eligible, ne_of, own
from search.study_state import StudyState
from trials.records.study_record import ExpectedGain
from trials.records.trial_record import NOT_BEGUN, Outcome, TrialKind, TrialRecord

# What more candidates are expected to gain: by how much the lowest NE would fall, from the lowest ones so far.
#
# The smallest of many values lie below a threshold u about as exponential variables do (Pickands 1975: excesses
# follow a generalised Pareto distribution, of which the exponential is the case between bounded and heavy
# tails). u is the ninth lowest NE, and the mean distance of the eight lower ones from it is the scale s. A
# further candidate comes below the best, at distance d from u, with probability q = 8 / n x exp(-d / s), and the
# lowest of m further ones is expected to be lower by
#
#     s (E1(m q) + ln(m q) + gamma),
#
# the integral of 1 - exp(-m q exp(-t / s)) over t. It knows nothing of the sampler, which may propose better
# ones than before, and nothing of a floor of NE, near which there is less to gain: docs/log.md has how it
# compares with searches that went on.

LEAST = 20
"""Number of candidates with a result from which anything is expected: before, the sampler has only begun."""
EULER_GAMMA = 0.5772156649015329
NEGLIGIBLE = 1e-9
"""Expected number of better candidates below which the difference of logarithms would be rounding alone."""
PATIENCE = 10
"""Number of candidates in a row after each of which little was to be expected: single ones are lucky, and then it
looks for a moment as if nothing were to be gained any more (docs/log.md)."""
TAIL = 8
"""Number of lowest NEs that the scale follows from. A share of the candidates in their place reaches into the
bulk, and promises gains for ever."""


def expected_gain(ne: Sequence[float], more: float) -> float | None:
    """Decrease of the lowest NE that is expected of so many further candidates, relative to it (0.001 is 0.1 %).

    Args:
        ne: NE of the candidates with a result.
        more: number of further candidates.

    Returns:
        None if there are too few candidates to say anything.
    """
    if len(ne) < LEAST:
        return None
    from scipy.special import exp1  # half a second of imports that a study's beginning need not wait for

    *lowest, threshold = sorted(ne)[: TAIL + 1]
    scale = statistics.fmean(threshold - value for value in lowest)
    if scale <= 0.0:
        return 0.0
    below = more * TAIL / len(ne) * math.exp(-(threshold - lowest[0]) / scale)
    return (
        scale * float(exp1(below) + math.log(below) + EULER_GAMMA) / lowest[0] if below > NEGLIGIBLE else 0.0
    )


def lasting_gain(ne: Sequence[float], more: float) -> float | None:
    """The largest of the gains that were expected of so many further candidates after each of the latest ten.

    Args:
        ne: NE of the candidates with a result, in the order in which they were proposed.
        more: number of further candidates.

    Returns:
        None if after one of them too few candidates had a result.
    """
    gains = [expected_gain(ne[: len(ne) - left_out], more) for left_out in range(PATIENCE)]
    known = [gain for gain in gains if gain is not None]
    return max(known) if len(known) == PATIENCE else None


# Turns of search and tuning: whose turn it is follows from what the latest turns of each have gained per
# second.

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


def tuning_gains_more(candidates: Sequence[TrialRecord], turn: int) -> bool:
    """Whether the latest turns of tuning, of so many candidates each, have lowered the best NE by more per second
    than those of the search. If both have gained as much, most often nothing, it is the turn of the one whose
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


NOTHING_NEW = 100
"""Number of proposals in a row that needed no training, after which a study without a number of trials ends."""
TUNING_SHARE = 0.5
"""Largest share of the minutes that is kept for a number of tuning candidates (`tune=N`)."""
BASELINE_SHARE = 0.5
"""Share of the minutes by which the baseline's own tuning has to end."""
OVERRUN_SHARE = 0.05
"""Share of the minutes by which a candidate may outlast the search's time before it is cut short."""
LARGEST_SHARE = 0.1
"""Largest share of the search's time left that one proposal may be expected to take, if it takes more than
`USUAL_TIMES` as long as others: an assumption."""
USUAL_TIMES = 2.0
"""How many times as long as the middle one of the candidates a proposal may be expected to take whatever is left:
an assumption."""
MOST_SCORING = 0.25
"""Largest share of the seconds left that the first candidate leaves for being scored: an assumption."""
CUT_SHARE = 0.5
"""Share of the seconds of a baseline that was cut with which a candidate, cut as well, begins: an assumption."""
FIRST_CANDIDATES = 3
"""Number of candidates from which there is a middle one to compare with."""
FIRST_TUNING = 0.5
"""Share of the time for candidates after which tuning has its first turn."""

LOG = logging.getLogger(__name__)


class Budget:
    """The part of a study's budget that its trials have left."""

    def __init__(
        self,
        config: StudyConfig,
        state: StudyState,
        *,
        spent: bool,
        later: LaterStages | None = None,
        detectable: Callable[[], float | None] = lambda: None,
        tunable: bool = False,
        corrections: StepCorrections | None = None,
    ) -> None:
        """A budget.

        Args:
            config: the study's settings.
            state: its state.
            spent: whether the study came to its end with these settings, whatever they would leave.
            later: what follows the search; None without `minutes`.
            detectable: measures the smallest relative difference of NE that this log can show; None if
                nothing can be measured yet.
            tunable: whether the space leaves anything to tune.
            corrections: correct the seconds of plans; None if trainings do not run on this machine.
        """
        self._config, self._state, self._later = config, state, later
        self.spent = spent
        """Says whether the study came to its end with these settings before. Networks that have not learnt then do
        not afterwards."""
        self._corrections = corrections
        self._detectable, self._turns = detectable, config.tunes_in_turns and tunable
        self._judged = 0
        self._last_detectable: float | None = None
        self.enough: ExpectedGain | None = state.head.expected_gain
        """What further candidates are expected to gain, if that has ended the search."""

    @property
    def promotes(self) -> bool:
        """Says whether some of what was selected has begun on all rows, and the baseline, which comes last, has
        not ended there: nothing more is proposed before it has."""
        promoted = self._state.promoted
        return bool(promoted) and all(
            trial.kind is not TrialKind.BASELINE or trial.result.outcome.unfinished for trial in promoted
        )

    def search_is_over(self, fruitless: int) -> bool:
        """Whether no further candidate is proposed, after `fruitless` proposals in a row needed no training."""
        trials = self._config.most_trials
        if self.spent or self.promotes:
            return True
        if trials is not None and len(untuned(self._state.candidates)) >= trials:
            return True
        reserved = 0.0
        if self._later is not None:  # for a number of tuning candidates
            seconds = self._still_to_tune() * candidate_seconds(self._state) / self._later.places
            reserved = min(seconds, TUNING_SHARE * self._later.minutes_seconds)
        if not self.has_time_for_candidate(reserved=reserved):
            return True
        return (trials is None and fruitless >= NOTHING_NEW) or self._is_enough()

    def tuning_is_next(self) -> bool:
        """Whether the next candidate tunes one of the best architectures, while the search goes on."""
        if not self._turns or self._later is None:
            return False
        candidates, turn = self._state.candidates, TUNED_ARCHITECTURES
        if not tuned(candidates):
            # the first turn is once half of the time for candidates is over
            spent = sum(trial.result.seconds or 0.0 for trial in candidates) / self._later.places
            left = self._search_end() - self._state.elapsed_seconds()
            return len(eligible(candidates)) >= turn and spent >= FIRST_TUNING * (spent + left)
        # the latest candidates that are all of the search, or all of tuning
        of_last = candidates[-1].origin.tuned_from is not None
        same = takewhile(lambda trial: (trial.origin.tuned_from is not None) == of_last, reversed(candidates))
        under_way = len(list(same)) % turn
        return of_last if under_way else tuning_gains_more(candidates, turn)

    def tuning_is_over(self) -> bool:
        """Whether no further candidate tunes one of the best architectures, after the search."""
        return self.spent or self.promotes or not self._still_to_tune() or not self.has_time_for_candidate()

    def has_time_for_candidate(self, *, reserved: float = 0.0) -> bool:
        """Whether a candidate that begins now is expected to end within the search's time, less `reserved`
        seconds; the first one within all of the minutes, since without it nothing follows the search."""
        if self._later is None:
            return True
        seconds = candidate_seconds(self._state)
        if not self.has_candidates:
            return self.has_time_for(CUT_SHARE * seconds if self._all_were_cut else seconds)
        return self._state.elapsed_seconds() + seconds < self._search_end() - reserved

    def is_worth_its_time(self, seconds_per_example: float) -> bool:
        """Says whether a proposal whose planned steps take so long per example leaves the search time for others:
        in few minutes one large network is not worth several that are tried in its place.

        Without `minutes` it is, and before there are candidates to compare with if it can end in time.
        """
        if self._later is None:
            return True
        trained = [
            trial.result.training_seconds
            for trial in self._state.candidates
            if trial.result.training_seconds > 0.0
        ]
        expected = expected_by_plan(seconds_per_example, self._state.completed, self._corrections)
        if expected is None:
            return True
        if len(trained) < FIRST_CANDIDATES:
            return expected <= self._left_for_candidate()
        left = max(0.0, self._search_end() - self._state.elapsed_seconds())
        return expected <= max(LARGEST_SHARE * left, USUAL_TIMES * median(trained))

    def too_long(self, trial: TrialRecord) -> str | None:
        """Returns why a training must not begin: by its plan it would outlast its part of the minutes. None if it
        may, as the first training of all may, and the first candidate of a study whose trainings were all cut."""
        planned, unsure = planned_seconds(trial, self._corrections), ""
        of_baseline = trial.kind is TrialKind.BASELINE
        if of_baseline:
            first = self._state.trials.keys() <= {trial.number}
        else:
            first = self._all_were_cut and not self.has_candidates
        if self._later is None or planned is None or first:
            return None
        expected = expected_by_plan(planned, self._state.completed, self._corrections)
        if expected is None:  # beside the first training, when plans are all that is known
            expected = planned * self._later.train_examples * trial.job.training.get("epochs", 1)
            correction = None if self._corrections is None else self._corrections.of_record(trial)
            unsure = "" if correction is None else f" (uncertain by a factor of {correction.spread:.2g})"
        left = self.seconds_left(trial) if of_baseline else self._left_for_candidate()
        # what takes about as long as others was asked before, by seconds that were measured
        usual = USUAL_TIMES * candidate_seconds(self._state)
        if left is None or expected <= max(left, usual):
            return None
        part = "the baseline's part" if of_baseline else "the search"
        return (
            f"{NOT_BEGUN}: it would take about {duration(expected)}{unsure}, and {part} has "
            f"{duration(max(0.0, left))} of the minutes left"
        )

    def seconds_left(self, trial: TrialRecord) -> float | None:
        """Returns after how many seconds a training that begins now is stopped, to count with what it has learnt;
        None for no limit.

        The baseline is stopped when its part of the minutes is over; its first training has at least half of what
        is left. A candidate is stopped when only the report has time.
        """
        if self._later is None or trial.origin.trained_for_weights:
            return None
        left = self._later.minutes_seconds - self._state.elapsed_seconds()
        if trial.kind is not TrialKind.BASELINE:
            scores = self._later.choosing() + self._later.scores()
            return left - self._later.closing - min(scores, MOST_SCORING * left)
        of_baseline = left - (1.0 - BASELINE_SHARE) * self._later.minutes_seconds
        return of_baseline if self._state.completed else max(of_baseline, BASELINE_SHARE * left)

    def _left_for_candidate(self) -> float:
        """Seconds that the search has for a candidate; all but the report's for the first one."""
        assert self._later is not None
        if not self.has_candidates:
            return self._later.minutes_seconds - self._later.closing - self._state.elapsed_seconds()
        return (
            self._search_end() + OVERRUN_SHARE * self._later.minutes_seconds - self._state.elapsed_seconds()
        )

    @property
    def has_candidates(self) -> bool:
        """Whether a candidate was begun."""
        return any(trial.result.outcome is not Outcome.INFEASIBLE for trial in self._state.candidates)

    @property
    def _all_were_cut(self) -> bool:
        """Whether every training was stopped before its end: then candidates are stopped, too."""
        return all(trial.result.measured.cut_after is not None for trial in self._state.completed)

    def has_time_for_baseline(self) -> bool:
        """Whether one more training of the baseline is expected to leave candidates their time."""
        if self._later is None or not self._state.completed:
            return True
        end = self._state.elapsed_seconds() + expected_seconds(self._state.completed)
        return end <= BASELINE_SHARE * self._later.minutes_seconds

    def has_time_for(self, seconds: float) -> bool:
        """Whether something of so many seconds, behind the search, leaves what the report needs."""
        if self._later is None:
            return True
        return self._state.elapsed_seconds() + seconds + self._later.closing <= self._later.minutes_seconds

    def cuts_short(self, trial: TrialRecord) -> bool:
        """Whether a training of the search has outlasted the search's time by so much that what follows would
        lack it. Before any candidate has completed nothing is cut: there would be nothing to go on with; nor is a
        winner that is trained for its weights."""
        if (
            trial.origin.trained_for_weights
            or self._later is None
            or trial.kind is not TrialKind.CANDIDATE
            or not self._state.selection.front
        ):
            return False
        grace = OVERRUN_SHARE * self._later.minutes_seconds
        return self._state.elapsed_seconds() > self._search_end() + grace

    def _search_end(self) -> float:
        """The study's second by which the last candidate has to end."""
        assert self._later is not None
        return self._later.minutes_seconds - self._later.seconds()

    def _still_to_tune(self) -> int:
        return max(0, self._config.tune_trials - len(tuned(self._state.candidates)))

    def _is_enough(self) -> bool:
        """Whether further candidates are expected to gain less than is worth it, or than this log can show."""
        if self.enough is not None:
            return True
        if not self._config.knows_when_to_stop:
            return False
        # equal jobs have one result, which is one draw
        done = eligible(own(self._state.candidates))
        if len(done) <= self._judged:
            return False
        self._judged = len(done)
        more, one = float(len(done)), candidate_seconds(self._state)
        if self._later is not None and one > 0.0:  # no more than the search's time has left
            left = self._search_end() - self._state.elapsed_seconds()
            more = min(more, max(1.0, left * self._later.places / one))
        gain = lasting_gain([ne_of(trial) for trial in done], more)
        worth = self._config.worth
        if gain is None or (
            self._last_detectable is not None and gain >= max(worth or 0.0, self._last_detectable)
        ):
            return False
        self._last_detectable = detectable = self._detectable()
        LOG.info(
            "%d more candidates: expected gain %g, detectable %s, worth %s", more, gain, detectable, worth
        )
        if detectable is None and worth is None:
            return False
        if gain >= max(worth or 0.0, detectable or 0.0):
            return False
        self.enough = ExpectedGain(
            percent=100.0 * gain,
            candidates=len(done),
            more=round(more),
            worth_percent=None if worth is None else 100.0 * worth,
            detectable_percent=None if detectable is None else 100.0 * detectable,
        )
        return True
