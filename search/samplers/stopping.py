"""Stopping rules by name: which candidate is given up. One file each; adding one is a file and an entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from scipy.special import stdtrit

from dhen.errors import unknown_name
from search.selection import eligible, ne_of, own, pareto_front
from trials.records.trial_record import Curve, Outcome, TrialKind, TrialRecord

# What a stopping rule sees of a study, and what it says.
#
# A rule judges a candidate at a milestone, its k-th evaluation on validation, by the candidates that have ended.
# It goes by their records alone, so a resumed study decides as it would have decided.

FEWEST = 8
"""Number of candidates that have to go on from the milestone to their end before any is stopped there: an
assumption, not measured."""


@dataclass(frozen=True)
class Stop:
    """The decision that a candidate's training ends here."""

    reason: str
    expected_ne: float
    """Lowest NE that the candidate would have come to."""


Judge = Callable[[TrialRecord, Sequence[TrialRecord]], Stop | None]
"""A function of a candidate whose curve ends at the milestone, and of all trials of the study; it returns None
if the candidate goes on."""


def first_stop(
    judge: Judge, record: TrialRecord, judged: int, trials: Sequence[TrialRecord]
) -> TrialRecord | None:
    """The record as it ends at the first evaluation after `judged` ones if the rule stops it; else None.

    Evaluations are judged one by one, and what came after the one that decides is dropped: how many arrive
    at once depends on the moment, and decisions must not.
    """
    for seen in range(judged + 1, len(record.result.curve) + 1):
        so_far = record.with_result(curve=record.result.curve[:seen])
        # it has an NE, and patience does not end it anyway, so that stopping saves something
        stale, patience = seen - 1 - _best(so_far.result.curve), record.job.training.get("patience", math.inf)
        can_be_judged = stale < patience and math.isfinite(best_ne(so_far, seen))
        stop = judge(so_far, trials) if can_be_judged else None
        if stop is not None:
            return so_far.with_result(
                outcome=Outcome.STOPPED,
                error=stop.reason,
                expected_ne=stop.expected_ne,
                validation=so_far.result.curve[_best(so_far.result.curve)].validation,
            )
    return None


def like(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Other candidates that were trained and evaluated by the same schedule, each training once."""
    schedule = schedule_of(candidate)
    return [
        trial for trial in own(trials) if trial.number != candidate.number and schedule_of(trial) == schedule
    ]


def went_on(milestone: int, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that completed and were evaluated again after this milestone."""
    completed = eligible(trials)
    return [
        trial
        for trial in completed
        if len(trial.result.curve) > milestone and math.isfinite(best_ne(trial, milestone))
    ]


def best_ne(trial: TrialRecord, milestone: int) -> float:
    """Lowest NE of the evaluations up to the milestone; infinite if there is none."""
    values = trial.result.curve.ne[:milestone]
    return min((ne for ne in values if not math.isnan(ne)), default=math.inf)


def _best(curve: Curve) -> int:
    """The place of the evaluation with the lowest NE."""
    ne = curve.ne
    return min(range(len(ne)), key=lambda place: (math.isnan(ne[place]), ne[place]))


def schedule_of(trial: TrialRecord) -> tuple[object, ...]:
    """Settings of evaluation: evaluations of equal number are comparable if these settings are equal."""
    keys = ("epochs", "evaluate_every", "schedule", "train_fraction")
    return tuple(trial.job.training.get(key) for key in keys)


# Forecast of a candidate's final NE, from the curves of other candidates at the same milestone and after it.
#
# Learning rates that fall to zero make curves drop at the end, which a formula fitted to one curve (Domhan et
# al., IJCAI 2015) cannot know, and others' curves show. So what is left to gain is a linear regression, over
# those that went on from the milestone to their end, on the lowest NE so far and on the last evaluation's gain
# (of a curve that falls geometrically the rest is proportional to it). Neither may count against a candidate: a
# slow learner far from all others is then given more than they had, not less. The bound is that of a new
# observation under normal errors (Student's t with the regression's own leverage), and no tighter than the
# quantile of the errors of those left out one at a time, once there are enough of them.

CONFIDENCE = 0.95
"""Confidence of the bound, one-sided: of twenty candidates one may come to a lower NE. Measured against 0.99
(benchmarks/search/stopping_replayed.py, docs/log.md, 2026-11-21): the same front in 97 % of the orders in place of
98 %, for 57 % of the examples in place of 70 %, at 60 candidates."""
LEAST_LEFT = 0.01
"""Smallest value of one less a leverage; an error is divided by it to become that of a candidate left out. An
assumption, not measured."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of the lowest NE at a candidate's end."""

    ne: float
    low: float
    """The optimistic bound of that NE."""


def forecast(candidate: TrialRecord, finished: Sequence[TrialRecord]) -> Forecast:
    """The forecast from the candidate's curve.

    Args:
        candidate: a trial whose curve ends at the milestone.
        finished: `base.FEWEST` trials or more that went on from the milestone to their end.
    """
    milestone = len(candidate.result.curve)
    x_NF = np.array([_features(trial, milestone) for trial in finished])
    left_N = np.array([_left(trial, milestone) for trial in finished])
    mean_F, mean = x_NF.mean(axis=0), left_N.mean()
    counts_F = nnls(x_NF - mean_F, left_N - mean)[0] > 0
    x_NF = (x_NF - mean_F)[:, counts_F]
    x_F = (np.array(_features(candidate, milestone)) - mean_F)[counts_F]
    inverse_FF = np.linalg.pinv(x_NF.T @ x_NF)
    weight_F = inverse_FF @ x_NF.T @ left_N
    error_N = left_N - mean - x_NF @ weight_F
    free = len(left_N) - 1 - len(x_F)
    deviation = np.sqrt((error_N**2).sum() / free * (1.0 + 1.0 / len(left_N) + x_F @ inverse_FF @ x_F))
    leverage_N = 1.0 / len(left_N) + np.einsum("nf,fg,ng->n", x_NF, inverse_FF, x_NF)
    # the bound that a new error stays below by rank alone (conformal), if enough errors are known
    left_out_N = np.sort(error_N / (1.0 - leverage_N).clip(LEAST_LEFT))
    rank = int(np.ceil(CONFIDENCE * (len(error_N) + 1)))
    quantile = float(left_out_N[rank - 1]) if rank <= len(error_N) else 0.0
    half_width = max(stdtrit(free, CONFIDENCE) * deviation, quantile)
    expected, lowest = max(mean + x_F @ weight_F, 0.0), best_ne(candidate, milestone)
    return Forecast(ne=float(lowest - expected), low=float(lowest - expected - half_width))


def _features(trial: TrialRecord, milestone: int) -> tuple[float, ...]:
    """The lowest NE so far, and by how much the last evaluation lowered it."""
    lowest = best_ne(trial, milestone)
    if milestone == 1:
        return (lowest,)
    before = best_ne(trial, milestone - 1)
    return (lowest, before - lowest if math.isfinite(before) else 0.0)


def _left(trial: TrialRecord, milestone: int) -> float:
    """Fall of a finished trial's NE after the milestone."""
    assert trial.result.validation is not None
    return best_ne(trial, milestone) - trial.result.validation.ne


# Stops a candidate whose curve, extrapolated with its uncertainty, can no longer reach the NE-FLOPs front.
#
# FLOPs are known before training, so the front needs no guess in that direction: a candidate whose optimistic
# final NE (`forecast`) is no lower than that of a trial on the front with no more FLOPs is dominated, whatever
# it still does.


def judge(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> Stop | None:
    """Stops a candidate that can no longer reach the front; a `search.samplers.stopping.Judge`."""

    milestone = candidate.result.curve[-1]
    finished = went_on(len(candidate.result.curve), like(candidate, trials))
    # the best on the front with no more FLOPs
    flops = candidate.job.flops
    assert flops is not None
    front = pareto_front(trial for trial in trials if trial.kind is TrialKind.CANDIDATE)
    no_dearer = [trial for trial in front if trial.job.flops is not None and trial.job.flops <= flops]
    if len(finished) < FEWEST or not no_dearer:
        return None
    rival = no_dearer[-1]
    expected, rival_ne = forecast(candidate, finished), ne_of(rival)
    if not rival_ne <= expected.low:
        return None
    return Stop(
        f"stopped at {milestone.examples:,} examples with NE {milestone.validation.ne:.5f}: expected to end "
        f"at {expected.ne:.5f}, not below {expected.low:.5f} ({100 * CONFIDENCE:.0f} %), and trial "
        f"{rival.number} has {rival_ne:.5f} at {(rival.job.flops or 0.0) / max(flops, 1.0):.2g} times its FLOPs",
        expected.ne,
    )


RULES: dict[str, Judge] = {"curve": judge}
NONE = "none"
"""Instead of a rule: every candidate is trained to its end."""
AUTO = NONE
"""The rule that `auto` means (docs/benchmarks/stopping.md has the comparison)."""


def stopping_rule(name: str) -> Judge | None:
    """The rule of this name; None for `none`.

    Raises:
        UserError: for an unknown rule, listing the rules there are.
    """
    if name == "auto":
        name = AUTO
    if name == NONE:
        return None
    if name not in RULES:
        raise unknown_name("stopping rule", name, [*RULES, NONE, "auto"])
    return RULES[name]
