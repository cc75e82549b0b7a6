"""What is selected among the completed trials of a study: its fronts, and what is kept beside them.

`judged` works it out of all of them. While a study searches, `RunningSelection` keeps it up with each candidate
that completes: of thousands only those that stand on a front are looked at again.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from dhen.errors import UserError
from trials.cluster.cluster import byte_words, parse_bytes
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

# The Pareto fronts of a study's candidates, NE against FLOPs and against table bytes, its best and its knee, and
# picks from them.

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
        UserError: if no trial fits, saying what is there.
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
        UserError: if nothing on the front fits, saying what is there.
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
    if what not in ("flops", "ms") or not _NUMBER.fullmatch(limit):
        expected = (
            "best, lowest, knee, 'flops<=5e6', 'ms<=2.5', 'table_bytes<=1GiB', or the number of a trial"
        )
        raise UserError(f"--pick {how!r}: expected {expected}.")
    taken = [(_flops(trial) if what == "flops" else trial.plan.serving_ms, trial) for trial in front]
    measured = [(value, trial) for value, trial in taken if value is not None]
    if not measured:
        raise UserError(
            f"--pick {how!r}: no forward time on the front is known, as the study has no serving.max_ms; "
            "bundles have theirs in bundle.json, export one by its number."
        )
    fitting = [trial for value, trial in measured if value <= float(limit)]
    if not fitting:
        lowest = f"{min(value for value, _ in measured):.3g}"
        needs = f"cheapest on the front needs {lowest} FLOPs"
        takes = f"fastest on the front takes {lowest} ms"
        raise UserError(f"--pick {how!r}: the {needs if what == 'flops' else takes}.")
    return fitting[-1]


def _flops(trial: TrialRecord) -> float:
    assert trial.job.flops is not None
    return trial.job.flops


def _table_bytes(trial: TrialRecord) -> int:
    assert trial.job.table_bytes is not None
    return trial.job.table_bytes


CONTENDERS = 5
"""Number of networks of the lowest NE whose weights are kept, on the front or not: what choosing the lowest of
many makes of its NE is worked out from what they predict."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What follows from the completed trials; it changes only when one more trial completes."""

    baseline: TrialRecord | None
    """The best of the baseline's own trials."""
    front: tuple[TrialRecord, ...]
    """Candidates, averages, and networks that learnt from one, that no other beats in both NE and FLOPs; by
    FLOPs."""
    knee: TrialRecord | None
    networks: tuple[TrialRecord, ...]
    """The front of candidates alone, by FLOPs, which averages are made of."""
    singles: tuple[TrialRecord, ...]
    """The front of all networks by themselves, by FLOPs: candidates, and what learnt from an average."""
    by_table_bytes: tuple[TrialRecord, ...]
    """What no other beats in both NE and table bytes, of all that the front is of; by table bytes."""
    runners_up: tuple[TrialRecord, ...]
    """The front of all other candidates, if averages are to be made, which may have these networks too."""
    contenders: tuple[TrialRecord, ...]
    """Candidates of the lowest NE, whatever their FLOPs."""
    members: tuple[TrialRecord, ...]
    """Networks of which averages on the front, or on that of table bytes, consist."""

    @property
    def trained(self) -> tuple[TrialRecord, ...]:
        """Trials that must have weights: the baseline, and networks on the front, by themselves or in an
        average."""
        baseline = [self.baseline] if self.baseline else []
        members = (trial for trial in self.members if trial.kind is not TrialKind.RETRAINING)
        together = (*baseline, *self.networks, *self.singles, *members)
        return tuple({trial.number: trial for trial in together}.values())

    @property
    def averages(self) -> tuple[TrialRecord, ...]:
        """Averages on the front, or on that of table bytes."""
        on_fronts = {trial.number: trial for trial in (*self.front, *self.by_table_bytes)}
        return tuple(trial for trial in on_fronts.values() if trial.kind is TrialKind.AVERAGE)

    @property
    def exported(self) -> tuple[TrialRecord, ...]:
        """Trials that must have weights because they may be exported: the trained ones, and networks on the front
        of table bytes, which no later stage trains again or scores."""
        by_tables = (trial for trial in self.by_table_bytes if trial.kind is not TrialKind.AVERAGE)
        return tuple({trial.number: trial for trial in (*self.trained, *by_tables)}.values())

    @property
    def kept(self) -> tuple[TrialRecord, ...]:
        """Trials whose weights are not dropped: those that may be exported, and others that are averaged or
        compared."""
        return (*self.exported, *self.runners_up, *self.contenders)


def judged(
    done: Sequence[TrialRecord],
    networks_of: Callable[[TrialRecord], tuple[TrialRecord, ...]],
    *,
    averages: bool,
) -> Selection:
    """The selection among trials that are all `eligible`, in order.

    Args:
        done: these trials.
        networks_of: finds the networks that a trial consists of.
        averages: whether averages are to be made, so that runners-up count.
    """
    tuned = [trial for trial in done if trial.kind is TrialKind.BASELINE]
    candidates = [trial for trial in done if trial.kind is TrialKind.CANDIDATE]
    made = [trial for trial in done if trial.kind is TrialKind.AVERAGE and _is_whole(networks_of(trial))]
    taught = [trial for trial in done if trial.kind is TrialKind.DISTILLED]
    networks = front_of(candidates)
    field = candidates + made + taught if made else candidates
    front = front_of(field) if made else networks
    by_table_bytes = table_bytes_front_of(field)
    fingerprints = {trial.job.fingerprint for trial in networks}
    others = [trial for trial in candidates if averages and trial.job.fingerprint not in fingerprints]
    distinct = {trial.job.fingerprint: trial for trial in reversed(candidates)}
    on_fronts = {
        trial.number: trial for trial in (*front, *by_table_bytes) if trial.kind is TrialKind.AVERAGE
    }
    return Selection(
        baseline=min(tuned, key=ne_of, default=None),
        front=tuple(front),
        knee=knee(front),
        networks=tuple(networks),
        singles=tuple(front_of(candidates + taught) if taught else networks),
        by_table_bytes=tuple(by_table_bytes),
        runners_up=tuple(front_of(others)),
        contenders=tuple(heapq.nsmallest(CONTENDERS, distinct.values(), key=ne_of)),
        members=tuple(network for average in on_fronts.values() for network in networks_of(average)),
    )


def _is_whole(members: Iterable[TrialRecord]) -> bool:
    """Whether all members have a result; a member that is trained again for its lost weights has none."""
    return all(member.result.outcome is Outcome.COMPLETED for member in members)


class RunningSelection:
    """The selection among the candidates of a search, and the baseline's own trials, as they complete.

    It is what `judged` makes of them all, worked out from those that may still count: what is no longer on a front
    never comes back to it. All are looked at again if a trial that counted has changed, as one does that is
    trained again, and if equal jobs have several numbers.
    """

    def __init__(self, *, averages: bool) -> None:
        """A search in which nothing has completed; `averages` says whether runners-up count."""
        self._averages = averages
        self._known: dict[int, TrialRecord] = {}
        """Trials that can be compared, by number."""
        self._equal = Counter[tuple[TrialKind, str]]()
        """How many of them have an equal job."""
        self._pool: dict[int, TrialRecord] | None = None
        """Those that may count; None if all may."""

    def take(self, trial: TrialRecord, *, counts: bool) -> None:
        """Takes in a trial of the search, new or changed; `counts` says whether it is `eligible`."""
        before = self._known.pop(trial.number, None)
        if before is not None:
            self._equal[_job(before)] -= 1
        if counts:
            self._known[trial.number] = trial
            self._equal[_job(trial)] += 1
        same = counts and (before is None or _compared(before) == _compared(trial))
        if self._equal[_job(trial)] > 1 or (before is not None and not same):
            self._pool = None
        elif same and self._pool is not None and (before is None or trial.number in self._pool):
            self._pool[trial.number] = trial

    def selection(self) -> Selection:
        """The selection as of now."""
        pool = self._known if self._pool is None else self._pool
        in_order = [trial for _, trial in sorted(pool.items())]
        selection = judged(in_order, lambda trial: (trial,), averages=self._averages)
        kept = {trial.number for trial in selection.kept}
        self._pool = {
            trial.number: trial for trial in in_order if trial.number in kept or self._equal[_job(trial)] > 1
        }
        return selection


def _job(trial: TrialRecord) -> tuple[TrialKind, str]:
    return trial.kind, trial.job.fingerprint


def _compared(trial: TrialRecord) -> tuple[object, ...]:
    """What trials are selected by."""
    return trial.job.fingerprint, trial.job.flops, trial.job.table_bytes, ne_of(trial)
