"""Networks of the front learn from the best average, after the search: what several predict, at the FLOPs of one.

Each is trained once more from its own seed, as a trial of its own, on labels that are half the average's
prediction (`trials.data.teacher`), and joins the front where it is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from search.budget.later_stages import MOST_TAUGHT
from search.execution.jobs import new_record, trained_job
from search.pareto import eligible, ne_of
from search.planning.admission import Admission, AdmittedTrial
from search.study_state import StudyState
from trials.data.cache import PreparedLog
from trials.job import Job
from trials.record import TrialKind, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """An average, and the networks that are to learn from it."""

    teacher: TrialRecord
    members: tuple[TrialRecord, ...]
    """The networks that the average consists of."""
    missing: tuple[tuple[TrialRecord, Job], ...]
    """Candidates on the front of candidates whose networks have not learnt from it so far, each with its job; the
    lowest NE comes first."""
    known: dict[str, TrialRecord]
    """Trials of earlier sessions by fingerprint of their job."""
    first_number: int
    """Number of the next trial."""

    @classmethod
    def of(cls, state: StudyState, log: PreparedLog) -> Lesson | None:
        """The lesson of a study; None where it has no average.

        The teacher is the average of lowest NE, on the front or not: what learns from it may push it off, and it
        must be the same when the study is gone on with.
        """
        averages = [trial for trial in eligible(state.trials.values()) if trial.kind is TrialKind.AVERAGE]
        if not averages:
            return None
        teacher = min(averages, key=ne_of)
        known = {
            trial.job.fingerprint: trial
            for trial in state.trials.values()
            if trial.kind is TrialKind.DISTILLED
        }
        jobs = (
            (network, trained_job(network, log).replace(teacher=teacher.job.fingerprint))
            for network in reversed(state.selection.networks[-MOST_TAUGHT:])
        )
        return cls(
            teacher=teacher,
            members=state.networks(teacher),
            missing=tuple((network, job) for network, job in jobs if _is_missing(known.get(job.fingerprint))),
            known=known,
            first_number=len(state.trials),
        )

    def trials(self, admission: Admission, has_time: Callable[[float], bool]) -> Iterator[AdmittedTrial]:
        """What is still to be trained, for as long as there is time; each is held as the candidate's network was,
        which fits."""
        number = self.first_number
        for network, job in self.missing:
            if not has_time(network.result.training_seconds):
                return
            earlier = self.known.get(job.fingerprint)
            fresh = new_record(
                earlier.number if earlier is not None else number,
                TrialKind.DISTILLED,
                network.point,
                job,
                distilled_from=network.number,
                teacher=self.teacher.number,
            ).replace(plan=network.plan)
            if earlier is not None and earlier.attempts:
                yield admission.admit(fresh, job, earlier)
            else:
                number += earlier is None
                yield fresh, job


def _is_missing(trial: TrialRecord | None) -> bool:
    return trial is None or trial.result.outcome.unfinished
