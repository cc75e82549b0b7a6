"""Whether a trial may train, and how: planned for the study's cluster, then judged by what serving asks.

What runs out of memory although it was admitted shows by how much plans are too low, which those that follow
leave free.
"""

from __future__ import annotations

from search.config import StudyConfig
from search.execution.trainer import Trainer
from search.planning.attempts import margin_bytes
from search.planning.plan_trial import plan_of, planned
from search.planning.serving_gate import Serving
from search.study_state import Standing
from trials.cluster.cluster import Cluster
from trials.job import Job
from trials.planner.plan import Plan
from trials.record import Outcome, TrialRecord

Upcoming = tuple[TrialRecord, Job | None]
"""A trial that comes up; without a job where its point gives no model, or one that is not to be trained."""


class Admission:
    """Of the trials of one study."""

    def __init__(self, config: StudyConfig, cluster: Cluster, trainer: Trainer, standing: Standing) -> None:
        self._cluster, self._prefer = cluster, config.prefer
        self._execution, self._standing = trainer.execution, standing
        self._serving = Serving(config.serving, trainer, standing.trials.values())
        self._margin_bytes = margin_bytes(standing.trials.values())

    def plan(self, job: Job) -> Plan:
        """Its plan, by what is known of how low plans are.

        Raises:
            UserError: for a batch smaller than the number of ranks.
        """
        return plan_of(job, self._cluster, self._prefer, self._margin_bytes)

    def planned(self, record: TrialRecord, job: Job) -> Upcoming:
        """With its plan; one that fits nowhere or is over a limit of serving has ended."""
        known = self._standing.trials.get(record.number)
        if known is not None and known.attempts:
            again = self._execution.next_attempt(known, job, self._prefer)
            if again is not None:
                return again, job
        record = self._serving.judged(self._with_plan(record, job), job)
        return record, job if record.outcome is Outcome.RUNNING else None

    def planned_by_size(self, record: TrialRecord, job: Job) -> TrialRecord:
        """One that another study has trained, whose forward time is not measured."""
        return self._serving.judged_by_size(self._with_plan(record, job))

    def next_attempt(self, record: TrialRecord, job: Job) -> TrialRecord | None:
        """What ran out of memory goes on with the next strategy, if there is one; what was killed, as it was."""
        self._margin_bytes = max(self._margin_bytes, margin_bytes([record]))
        return self._execution.next_attempt(record, job, self._prefer)

    def _with_plan(self, record: TrialRecord, job: Job) -> TrialRecord:
        return planned(record, job, self._cluster, self._prefer, margin_bytes=self._margin_bytes)
