"""What a line proposes: a point of the space, or a model with its training, and who proposes it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dhen.config import DhenConfig
from dhen.errors import UserError, unknown_name
from dhen.model import build_model, parse_model
from dhen.values import fingerprint, parse
from search.execution.admission import Admission
from search.execution.trainer import new_record
from search.study_state import StudyState
from spaces.space import Candidate, Point, Space
from trials.records.job import Job, TrainingConfig
from trials.records.study_record import RefusedProposal
from trials.records.trial_record import Outcome, Proposal, TrialKind, TrialRecord

# Where proposals come from: lines of a file that may grow while the study runs, or a function that is asked.
#
# A line is a JSON object. An axis name -> value mapping is a point of the space, a mapping with `layers` a model
# configuration; `{"point": ...}` and `{"model": ..., "training": ...}` say which of the two is meant. `by` and
# `why` say who proposes it and why.

WRITING_SECONDS = 30.0
"""Seconds after a file has changed for which a last line that is no JSON may be one that is being written."""
Proposer = Callable[[Sequence[TrialRecord]], Iterable[Mapping[str, Any]]]
"""A function that is given the trials so far, and returns what it proposes next: mappings as in lines of a file,
none if it has nothing to propose now."""


@dataclass(frozen=True, kw_only=True)
class ProposalLine:
    """One proposal as it was received."""

    number: int
    """Number of the line in its file, from 1 on; of the proposals of a function, in their order."""
    text: str

    @property
    def key(self) -> str:
        """Identity of the line, by which a resumed study knows that it has answered it."""
        return fingerprint([self.number, self.text.strip()])


Lines = Callable[[Sequence[TrialRecord]], Sequence[ProposalLine]]
"""A function that returns all lines there are so far, given the trials so far."""


def lines_of_file(path: Path) -> Lines:
    """Returns what reads the file's lines, anew each time.

    Raises:
        UserError: if there is no such file.
    """
    if not path.is_file():
        raise UserError(
            f"proposals={path}: no such file. It holds a JSON object per line; an empty one will do, since lines "
            "may be added while the study runs."
        )

    def read(trials: Sequence[TrialRecord]) -> list[ProposalLine]:
        try:
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            old = time.time() - path.stat().st_mtime > WRITING_SECONDS
        except OSError:  # moved away for a moment, perhaps by an editor that writes it anew
            return []
        lines = [ProposalLine(number=number, text=line) for number, line in enumerate(text.split("\n"), 1)]
        # behind the last newline stands nothing, or a line that somebody is writing at this moment
        written = lines if old or _is_json(lines[-1].text) else lines[:-1]
        return [line for line in written if line.text.strip()]

    return read


def lines_of_function(propose: Proposer, answered: int) -> Lines:
    """Returns what asks the function; `answered` proposals of it had an answer in earlier sessions."""
    received: list[ProposalLine] = []

    def ask(trials: Sequence[TrialRecord]) -> list[ProposalLine]:
        for proposal in propose(trials):
            text = json.dumps(dict(proposal), sort_keys=True)
            received.append(ProposalLine(number=answered + len(received) + 1, text=text))
        return received

    return ask


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


CREDIT = ("by", "why")
WHAT = ("point", "model", "training")
LONGEST = 2000
"""Number of characters of `by` and of `why` that are kept: reports and tags show them."""


@dataclass(frozen=True, kw_only=True)
class ReadProposal:
    """A proposal that is understood."""

    candidate: Candidate
    point: Point
    """The point of the space that it is; empty if it lies outside the space."""
    proposal: Proposal


def read_line(line: ProposalLine, space: Space, proven: Mapping[str, Any]) -> ReadProposal:
    """Returns what a line proposes.

    Args:
        line: the line.
        space: the study's space.
        proven: training settings of the tuned baseline, which stand for those that the proposal leaves out.

    Raises:
        UserError: saying what is wrong with the line.
    """
    data = _mapping(line.text)
    credit = {name: _words(name, data.pop(name, None)) for name in CREDIT}
    proposal = Proposal(line=line.number, key=line.key, **credit)
    if "layers" in data or "family" in data:
        data = {"model": data}
    elif not set(data) & set(WHAT):
        data = {"point": data}
    for name in data:
        if name not in WHAT:
            raise unknown_name("key of a proposal", name, (*WHAT, *CREDIT))
    if "point" in data:
        return _read_point(data, space, proven, proposal)
    return _read_model(data, space, proven, proposal)


def credit_of(line: ProposalLine) -> dict[str, str | None]:
    """Returns `by` and `why` of a line, as far as it can be read at all."""
    try:
        data = _mapping(line.text)
        return {name: _words(name, data.get(name)) for name in CREDIT}
    except UserError:
        return dict.fromkeys(CREDIT)


def _mapping(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(
            "expected a JSON object, of a point (axis name to value) or of a model configuration, received "
            f"{type(data).__name__}."
        )
    return data


def _words(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} is a text, received {value!r}.")
    # half of a character, if a text was cut inside of one, cannot be stored
    return value[:LONGEST].encode("utf-8", "replace").decode("utf-8") if value else None


def _read_point(
    data: dict[str, Any], space: Space, proven: Mapping[str, Any], proposal: Proposal
) -> ReadProposal:
    given = data["point"]
    if len(data) > 1 or not isinstance(given, dict) or not given:
        raise UserError(
            'a point stands alone and has a value for one axis at least, such as {"point": {"depth": 2}}; its '
            "training settings are axes, too."
        )
    axes = {axis.name: axis for axis in space.axes}
    for name in given:
        if name not in axes:
            raise unknown_name("axis of the space", name, axes)
    # axes that are left out: what has worked for the baseline, else what the space names first
    point: Point = {name: axis.first for name, axis in axes.items()}
    for key, axis in space.training_axes.items():
        if axis.size > 1 and axis.has(proven.get(key)):
            point[axis.name] = proven[key]
    point |= given
    return ReadProposal(candidate=space.decode(point), point=point, proposal=proposal)


def _read_model(
    data: dict[str, Any], space: Space, proven: Mapping[str, Any], proposal: Proposal
) -> ReadProposal:
    if "model" not in data:
        raise UserError(
            "training settings need the model that they are for: give `model` as well, or a point."
        )
    given = data.get("training") or {}
    if not isinstance(given, dict):
        raise UserError(f"training is a mapping of settings, received {type(given).__name__}.")
    if "train_fraction" in given:
        raise UserError(
            "training.train_fraction is the study's own: candidates on different parts do not compare."
        )
    if not isinstance(data["model"], dict):
        raise UserError(
            f"model is a mapping, as in a file that `train` takes, received {type(data['model']).__name__}."
        )
    model = parse_model({"family": "dhen"} | data["model"], "model")
    if not isinstance(model, DhenConfig):
        raise UserError(
            f"a candidate is a model of the family dhen, received {model.family}; a model of another family can "
            "be the baseline of a study: baseline=FILE."
        )
    held = space.with_first(proven)
    try:
        point = space.encode(Candidate(model=model, training=held | given))
        return ReadProposal(candidate=space.decode(point), point=point, proposal=proposal)
    except UserError:  # outside the space: it is trained all the same, and the sampler is not told
        training = {key: proven[key] for key in space.training_axes} | given
        outside = proposal.replace(outside=True, training=training)
        return ReadProposal(candidate=Candidate(model=model, training=training), point={}, proposal=outside)


# The proposals of one study from outside: taken as they come, checked before a second is spent on them.
#
# A line is read, its network is built on the meta device, it is compared with all trials and planned for the
# study's cluster. What fails is answered with the reason, and the study goes on; no trial and no budget is spent
# on it. A line is answered once: its key is in the trial that it became, or in the study's refusals
# (docs/decisions/0023-proposals.md).

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OutsideProposals:
    """Takes the next line that can be trained, and answers those that cannot."""

    lines: Lines
    """Returns all lines so far."""
    space: Space
    state: StudyState
    """State of the study, whose trials and refusals say which lines have their answer."""
    admission: Admission
    job_of: Callable[[Candidate], Job]
    """Makes the study's job of a candidate."""
    refuse: Callable[[RefusedProposal], None]
    """Commits a refusal."""

    def next(self) -> ReadProposal | None:
        """The next proposal that can be trained; None if no line is left."""
        trials = [trial for _, trial in sorted(self.state.trials.items())]
        answered = {trial.origin.proposal.key for trial in trials if trial.origin.proposal is not None}
        answered |= {refusal.key for refusal in self.state.head.refused}
        for line in self.lines(trials):
            if line.key not in answered:
                try:
                    return self._checked(line)
                except UserError as error:
                    reason = str(error)
                refusal = RefusedProposal(line=line.number, key=line.key, reason=reason, **credit_of(line))
                LOG.warning("proposal %d is not trained: %s", line.number, reason)
                self.refuse(refusal)
                self.state.say(f"proposal {line.number}{refusal.by_words} is not trained: {reason}")
        return None

    def _checked(self, line: ProposalLine) -> ReadProposal:
        """What the line proposes, once everything that is known without training is known to be well.

        Raises:
            UserError: saying why it is not trained.
        """
        proven = parse(TrainingConfig, self.state.require_baseline().job.training, "ledger")
        read = read_line(line, self.space, dict(proven))
        job = self.job_of(read.candidate)
        for trial in self.state.trials.values():
            if trial.job.fingerprint == job.fingerprint:
                raise UserError(f"the same as trial {trial.number}: an equal model, trained equally.")
        try:
            with torch.device("meta"):
                build_model(job.model, job.features)
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"the network cannot be built: {error}") from error
        number = len(self.state.trials)
        admitted = self.admission.admit_by_size(new_record(number, TrialKind.CANDIDATE, {}, job), job)
        if admitted.result.outcome is Outcome.INFEASIBLE:
            raise UserError(admitted.result.error or "no strategy makes it fit.")
        return read
