"""The proposals of one study from outside: taken as they come, checked before a second is spent on them.

A line is read, its network is built on the meta device, it is compared with all trials and planned for the
study's cluster. What fails is answered with the reason, and the study goes on; no trial and no budget is spent on
it. A line is answered once: its key is in the trial that it became, or in the study's refusals
(docs/decisions/0028-proposals.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from dhen.errors import UserError
from dhen.model import build_model
from dhen.values import parse
from search.execution.jobs import new_record
from search.planning.admission import Admission
from search.proposals.lines import Line, Lines
from search.proposals.read_line import ReadProposal, credit_of, read_line
from search.study_state import StudyState
from spaces.space import Candidate, Space
from trials.job import Job, TrainingConfig
from trials.record import Outcome, TrialKind
from trials.study_record import RefusedProposal

LOG = logging.getLogger(__name__)


class OutsideProposals:
    """Takes the next line that can be trained, and answers those that cannot."""

    def __init__(
        self,
        *,
        lines: Lines,
        space: Space,
        state: StudyState,
        admission: Admission,
        job_of: Callable[[Candidate], Job],
        refuse: Callable[[RefusedProposal], None],
    ) -> None:
        """The proposals of one study.

        Args:
            lines: returns all lines so far.
            space: the study's space.
            state: state of the study, whose trials and refusals say which lines have their answer.
            admission: plans what is proposed.
            job_of: makes the study's job of a candidate.
            refuse: commits a refusal.
        """
        self._lines, self._space, self._state = lines, space, state
        self._admission, self._job_of, self._refuse = admission, job_of, refuse

    def next(self) -> ReadProposal | None:
        """The next proposal that can be trained; None where no line is left."""
        for line in self._unanswered():
            try:
                return self._checked(line)
            except UserError as error:
                self._answer(line, str(error))
        return None

    def _unanswered(self) -> Iterator[Line]:
        """Lines that are neither a trial nor refused."""
        trials = [trial for _, trial in sorted(self._state.trials.items())]
        answered = {trial.origin.proposal.key for trial in trials if trial.origin.proposal is not None}
        answered |= {refusal.key for refusal in self._state.head.refused}
        return (line for line in self._lines(trials) if line.key not in answered)

    def _checked(self, line: Line) -> ReadProposal:
        """What the line proposes, once everything that is known without training is known to be well.

        Raises:
            UserError: saying why it is not trained.
        """
        proven = parse(TrainingConfig, self._state.require_baseline().job.training, "ledger")
        read = read_line(line, self._space, dict(proven))
        job = self._job_of(read.candidate)
        for trial in self._state.trials.values():
            if trial.job.fingerprint == job.fingerprint:
                raise UserError(f"the same as trial {trial.number}: an equal model, trained equally.")
        try:
            with torch.device("meta"):
                build_model(job.model, job.features)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"the network cannot be built: {error}") from error
        number = len(self._state.trials)
        admitted = self._admission.admit_by_size(new_record(number, TrialKind.CANDIDATE, {}, job), job)
        if admitted.result.outcome is Outcome.INFEASIBLE:
            raise UserError(admitted.result.error or "no strategy makes it fit.")
        return read

    def _answer(self, line: Line, reason: str) -> None:
        refusal = RefusedProposal(line=line.number, key=line.key, reason=reason, **credit_of(line))
        LOG.warning("proposal %d is not trained: %s", line.number, reason)
        self._refuse(refusal)
        self._state.say(f"proposal {line.number}{refusal.by_words} is not trained: {reason}")
