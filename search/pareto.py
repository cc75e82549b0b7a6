"""The NE-FLOPs Pareto front of a study's candidates, its best and its knee, and picks from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from operator import itemgetter

from dhen.errors import UserError
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord

_FIRST_THREE = itemgetter(0, 1, 2)


def eligible(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Trials with a result, of their own or shared with an equal network, that can be compared."""
    return [
        trial
        for trial in trials
        if (result := trial.result).outcome is Outcome.COMPLETED
        and result.validation is not None
        and not math.isnan(result.validation.ne)
        and trial.job.flops is not None
    ]


def ne_of(trial: TrialRecord) -> float:
    """NE on validation of an eligible trial."""
    assert trial.result.validation is not None, "only eligible trials are compared"
    return trial.result.validation.ne


def log_flops(flops: float | None) -> float:
    """Logarithm to base 10, as candidates differ by orders of magnitude: 10 to 5 is as much as 2 to 1."""
    return math.log10(max(flops or 0.0, 1.0))


def pareto_front(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Trials that no other beats in both NE and FLOPs, by FLOPs; of equal trials the first stands."""
    return front_of(eligible(trials))


def front_of(comparable: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The front of trials that are all `eligible`."""
    front: list[TrialRecord] = []
    lowest_ne = math.inf
    ascending = sorted(
        ((_flops(trial), ne_of(trial), trial.number, trial) for trial in comparable), key=_FIRST_THREE
    )
    for _, ne, _, trial in ascending:
        if ne < lowest_ne or not front:
            front.append(trial)
            lowest_ne = ne
    return front


def knee(front: list[TrialRecord]) -> TrialRecord | None:
    """The trial where the front bends most: farthest below the line between its ends, NE against log FLOPs."""
    if len(front) < 3:
        return front[-1] if front else None
    first, last = front[0], front[-1]
    x_span = math.log(_flops(last)) - math.log(max(_flops(first), 1.0))
    y_span = ne_of(first) - ne_of(last)

    def below(trial: TrialRecord) -> float:
        x = (math.log(max(_flops(trial), 1.0)) - math.log(max(_flops(first), 1.0))) / x_span
        return (ne_of(first) - ne_of(trial)) / y_span - x

    return max(front, key=below)


def picked(record: StudyRecord, how: str) -> TrialRecord:
    """The trial that `how` names: the study's `best`, one of its front (see `pick`), or by its number another
    whose weights are kept: the baseline, the front of networks alone, and members of averages.

    Raises:
        UserError: where no trial fits, saying what is there.
    """
    front = [record.trial(number) for number in record.front]
    if how == "best" and record.best is not None:
        return record.trial(record.best)
    others = [record.trial(number) for number in record.networks_front]
    others += [record.trial(record.baseline)] if record.baseline is not None else []
    networks = (network for trial in (*front, *others) for network in record.networks(trial))
    named = {network.number: network for network in networks if network.kind is not TrialKind.RETRAINING}
    if how.isdigit() and int(how) in named:
        return named[int(how)]
    return pick(front, how)


def pick(front: list[TrialRecord], how: str) -> TrialRecord:
    """The trial of the front that `lowest`, `knee`, `flops<=X`, `ms<=X` or a trial number names.

    Raises:
        UserError: where nothing on the front fits, saying what is there.
    """
    if not front:
        raise UserError("no candidate has completed yet, so there is nothing to pick.")
    if how == "lowest":
        return front[-1]
    if how == "knee":
        knee_trial = knee(front)
        assert knee_trial is not None
        return knee_trial
    if how.isdigit():
        for trial in front:
            if trial.number == int(how):
                return trial
        numbers = ", ".join(str(trial.number) for trial in front)
        raise UserError(f"trial {how} is not on the front; the front is {numbers} (others keep no weights).")
    limit = re.fullmatch(r"(flops|ms)\s*<=\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", how.strip())
    if limit is None:
        expected = "best, lowest, knee, 'flops<=5e6', 'ms<=2.5', or the number of a trial"
        raise UserError(f"--pick {how!r}: expected {expected}.")
    return _within(front, how, limit[1], float(limit[2]))


def _within(front: list[TrialRecord], how: str, what: str, limit: float) -> TrialRecord:
    """The trial of the lowest NE that takes no more than `limit` of `what`, FLOPs or milliseconds."""
    taken = [(_flops(trial) if what == "flops" else trial.plan.serving_ms, trial) for trial in front]
    measured = [(value, trial) for value, trial in taken if value is not None]
    if not measured:
        raise UserError(
            f"--pick {how!r}: no forward time on the front is known, as the study has no serving.max_ms; "
            "bundles have theirs in bundle.json, export one by its number."
        )
    fitting = [trial for value, trial in measured if value <= limit]
    if not fitting:
        least = f"{min(value for value, _ in measured):.3g}"
        needs = f"cheapest on the front needs {least} FLOPs"
        takes = f"fastest on the front takes {least} ms"
        raise UserError(f"--pick {how!r}: the {needs if what == 'flops' else takes}.")
    return fitting[-1]


def _flops(trial: TrialRecord) -> float:
    assert trial.job.flops is not None
    return trial.job.flops
