"""The Pareto fronts of a study's candidates, NE against FLOPs and against table bytes, its best and its knee, and
picks from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from dhen.errors import UserError
from trials.cluster.quantity import byte_words, parse_bytes
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord

_FIRST_THREE = itemgetter(0, 1, 2)
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


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


def table_bytes_front_of(comparable: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Trials, of those that are all `eligible`, that no other beats in both NE and table bytes, by table bytes."""
    return front_of((trial for trial in comparable if trial.job.table_bytes is not None), _table_bytes)


def front_of(
    comparable: Iterable[TrialRecord], price: Callable[[TrialRecord], float] | None = None
) -> list[TrialRecord]:
    """The front of trials that are all `eligible`; `price` is what NE is held against, by default FLOPs."""
    price = price or _flops
    front: list[TrialRecord] = []
    lowest_ne = math.inf
    ascending = sorted(
        ((price(trial), ne_of(trial), trial.number, trial) for trial in comparable), key=_FIRST_THREE
    )
    for _, ne, _, trial in ascending:
        if ne < lowest_ne or not front:
            front.append(trial)
            lowest_ne = ne
    return front


def own(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the candidates, each training once: equal jobs share a result."""
    return [
        trial for trial in trials if trial.kind is TrialKind.CANDIDATE and trial.origin.reused_from is None
    ]


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
    """The trial that `how` names: the study's `best`, one of its fronts (see `pick`), or by its number another
    whose weights are kept: the baseline, the front of networks alone, and members of averages.

    Raises:
        UserError: where no trial fits, saying what is there.
    """
    front = [record.trial(number) for number in record.front]
    if how == "best" and record.best is not None:
        return record.trial(record.best)
    if how.isdigit():
        if int(how) not in record.exportable:
            kept = ", ".join(map(str, sorted(record.exportable)))
            raise UserError(f"no weights of trial {how} are kept. Kept are those of {kept or 'none so far'}.")
        return record.trial(int(how))
    return pick(front, how, [record.trial(number) for number in record.table_bytes_front])


def pick(front: list[TrialRecord], how: str, by_tables: Sequence[TrialRecord] = ()) -> TrialRecord:
    """The trial of the front that `lowest`, `knee`, `flops<=X` or `ms<=X` names, or the one of the front of table
    bytes, `by_tables`, that `table_bytes<=X` names.

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
    what, _, limit = (word.strip() for word in how.partition("<="))
    if what == "table_bytes" and limit:
        return _within_table_bytes(by_tables, how, limit)
    if what not in ("flops", "ms") or not _NUMBER.fullmatch(limit):
        expected = (
            "best, lowest, knee, 'flops<=5e6', 'ms<=2.5', 'table_bytes<=1GiB', or the number of a trial"
        )
        raise UserError(f"--pick {how!r}: expected {expected}.")
    return _within(front, how, what, float(limit))


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


def _within_table_bytes(by_tables: Sequence[TrialRecord], how: str, limit: str) -> TrialRecord:
    """The trial of the lowest NE whose embedding tables take no more than `limit`."""
    try:
        most = parse_bytes(limit)
    except ValueError as error:
        raise UserError(f"--pick {how!r}: {error}.") from None
    fitting = [trial for trial in by_tables if _table_bytes(trial) <= most]
    if not fitting:
        least = min(map(_table_bytes, by_tables), default=None)
        smallest = f"{byte_words(least)} ({least:,} bytes)" if least is not None else "not known"
        raise UserError(f"--pick {how!r}: the smallest embedding tables on the front take {smallest}.")
    return fitting[-1]


def _flops(trial: TrialRecord) -> float:
    assert trial.job.flops is not None
    return trial.job.flops


def _table_bytes(trial: TrialRecord) -> int:
    assert trial.job.table_bytes is not None
    return trial.job.table_bytes
