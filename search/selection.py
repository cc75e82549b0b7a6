"""What is selected among the completed trials of a study: its fronts, and what is kept beside them.

`judged` works it out of all of them. While a study searches, `Standing` keeps it up with each candidate that
completes: of thousands only those that stand on a front are looked at again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from search.pareto import front_of, knee, ne_of, table_bytes_front_of
from trials.record import Outcome, TrialKind, TrialRecord

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
    """The front of all other candidates, where averages are to be made, which may have these networks too."""
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


class Standing:
    """The selection among the candidates of a search, and the baseline's own trials, as they complete.

    It is equal to what `judged` makes of them all, and takes as long as the fronts are. Where a trial that counted
    has changed, as one does that is trained again, it is worked out anew.
    """

    def __init__(self, *, averages: bool) -> None:
        """A search in which nothing has completed; `averages` says whether runners-up count."""
        self._averages = averages
        self._tuned: dict[int, TrialRecord] = {}
        self._known: dict[int, TrialRecord] = {}
        """Candidates that can be compared, by number."""
        self._of_job: dict[str, list[int]] = {}
        """Their numbers by the fingerprint of their job."""
        self._networks: list[TrialRecord] = []
        self._by_table_bytes: list[TrialRecord] = []
        self._runners_up: list[TrialRecord] = []
        self._contenders: dict[str, tuple[float, int]] = {}
        """Of the contenders, by fingerprint, what they are ordered by."""
        self._stale = True
        """Whether all of it has to be worked out anew, as of the trials that a study is opened with."""

    def take(self, trial: TrialRecord, *, counts: bool) -> None:
        """Takes in a trial of the search, new or changed; `counts` says whether it is `eligible`."""
        if trial.kind is TrialKind.BASELINE:
            self._tuned.pop(trial.number, None)
            if counts:
                self._tuned[trial.number] = trial
            return
        before = self._known.pop(trial.number, None)
        if counts:
            self._known[trial.number] = trial
        if before is None and counts:
            self._add(trial)
        elif before is not None:
            self._stale = self._stale or not counts or _compared(before) != _compared(trial)
            for front in (self._networks, self._by_table_bytes, self._runners_up):
                front[:] = (trial if each.number == trial.number else each for each in front)

    def selection(self) -> Selection:
        """The selection as of now."""
        if self._stale:
            self._work_out()
        networks = tuple(self._networks)
        contenders = sorted(self._contenders, key=self._contenders.__getitem__)
        return Selection(
            baseline=min((self._tuned[number] for number in sorted(self._tuned)), key=ne_of, default=None),
            front=networks,
            knee=knee(self._networks),
            networks=networks,
            singles=networks,
            by_table_bytes=tuple(self._by_table_bytes),
            runners_up=tuple(self._runners_up),
            contenders=tuple(self._known[min(self._of_job[name])] for name in contenders),
            members=(),
        )

    def _add(self, trial: TrialRecord) -> None:
        """Puts one more candidate where it stands: what is no longer on a front never comes back to it."""
        name = trial.job.fingerprint
        twins = self._of_job.setdefault(name, [])
        twins.append(trial.number)
        if self._stale:
            return
        before = {each.job.fingerprint for each in self._networks}
        self._networks = front_of([*self._networks, trial])
        self._by_table_bytes = table_bytes_front_of([*self._by_table_bytes, trial])
        now = {each.job.fingerprint for each in self._networks}
        # a network on the front is no runner-up, under whatever number
        self._stale = self._stale or (name not in before and name in now and len(twins) > 1)
        left = {number: self._known[number] for gone in before - now for number in self._of_job[gone]}
        if name not in now:
            left[trial.number] = trial
        if self._averages and left:
            self._runners_up = front_of([*self._runners_up, *left.values()])
        self._compete(name)

    def _compete(self, name: str) -> None:
        order = self._order(name)
        self._stale = self._stale or order > self._contenders.get(name, order)
        self._contenders[name] = order
        if len(self._contenders) > CONTENDERS:
            del self._contenders[max(self._contenders, key=self._contenders.__getitem__)]

    def _order(self, name: str) -> tuple[float, int]:
        """What contenders are ordered by: NE, and of equal ones the network that was proposed again last."""
        numbers = self._of_job[name]
        return ne_of(self._known[min(numbers)]), -max(numbers)

    def _work_out(self) -> None:
        """Works all of it out of all candidates."""
        self._stale = False
        self._of_job.clear()
        for number, trial in self._known.items():
            self._of_job.setdefault(trial.job.fingerprint, []).append(number)
        candidates = list(self._known.values())
        self._networks, self._by_table_bytes = front_of(candidates), table_bytes_front_of(candidates)
        taken = {trial.job.fingerprint for trial in self._networks}
        others = [trial for trial in candidates if self._averages and trial.job.fingerprint not in taken]
        self._runners_up = front_of(others)
        orders = {name: self._order(name) for name in self._of_job}
        self._contenders = {
            name: orders[name] for name in heapq.nsmallest(CONTENDERS, orders, key=orders.__getitem__)
        }


def _compared(trial: TrialRecord) -> tuple[object, ...]:
    """What trials are selected by."""
    return trial.job.fingerprint, trial.job.flops, trial.job.table_bytes, ne_of(trial)
