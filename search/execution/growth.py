"""A study widens its space if its best networks sit on an edge of it (docs/decisions/0021-spaces.md).

Every few candidates it looks at the best by NE and at the front. If they sit at an end of an ordered axis,
the axis goes on by one step, if a candidate beyond the end fits the memory, serving and the budget: the best
one at that end, moved on. It is the next start point, so that whatever the sampler, the new value is tried
beside one that differs in nothing else. A step is committed before anything is proposed by it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from dashboards.edges import Edge, edges_of, is_at_end, widened_now
from dhen.blocks import BLOCKS
from dhen.config import DhenConfig, LayerConfig
from dhen.errors import UserError
from search.execution.admission import Admission
from search.execution.trainer import new_record
from search.selection import eligible, front_of, ne_of, own
from search.study_state import StudyState
from spaces.axes import Axis, ChoiceAxis, first_label_beyond, is_number, label, value_beyond
from spaces.space import MOST_LAYERS, Candidate, Point, Space, load_space
from trials.records.findings import DEPTH, OrderedAxis
from trials.records.job import Job, TrainingConfig
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

# Which axes of a space are ordered, from less to more, and whether a wider space could go beyond their ends.

LEFT_OUT = ("members_from",)
"""Settings that are numbers of layers, and bound by the depth alone."""


def ordered_axes(space: Space) -> tuple[OrderedAxis, ...]:
    """The axes of a space that are ranges, or choices of numbers or widths, in the order of sampling."""
    return tuple(_all(space))


def _all(space: Space) -> Iterator[OrderedAxis]:
    yield from _read(space, space.depth, {}, None, part=DEPTH, key=DEPTH)
    for index, axes in enumerate(space.layer_axes.values()):
        for name, axis in axes.items():
            kind, _, key = name.rpartition(".")
            fields = BLOCKS[kind].model_fields if kind else LayerConfig.model_fields
            if key in fields:  # a slot's kind is none
                yield from _read(space, axis, fields, kind or None, part="layer", key=key, layer=index)
    for key, axis in space.model_axes.items():
        if key not in LEFT_OUT:
            yield from _read(space, axis, DhenConfig.model_fields, None, part="model", key=key)
    for key, axis in space.training_axes.items():
        yield from _read(space, axis, TrainingConfig.model_fields, None, part="training", key=key)


def _read(
    space: Space, axis: Axis, fields: Mapping[str, FieldInfo], kind: str | None, **where: Any
) -> Iterator[OrderedAxis]:
    """The axis as an ordered one; nothing if it is none, or has one value."""
    values = axis.ascending if isinstance(axis, ChoiceAxis) else ()
    if axis.size == 1 or (isinstance(axis, ChoiceAxis) and not values):
        return
    field = fields.get(where["key"])
    least, most = (1.0, float(MOST_LAYERS)) if field is None else _limits(field)
    low, high = (values[0], values[-1]) if isinstance(axis, ChoiceAxis) else (axis.low, axis.high)
    ends = {} if isinstance(axis, ChoiceAxis) else {"low": axis.low, "high": axis.high, "log": axis.log}
    default = None if field is None else field.get_default(call_default_factory=True)
    yield OrderedAxis(
        name=axis.name,
        kind=kind,
        values=tuple(map(label, values)),
        default=default if is_number(default) else None,
        open_below=low > least if is_number(low) else low != (),
        open_above=high < most if is_number(high) else True,
        tuned_last=axis.name in space.left_for_tuning,
        **ends,
        **where,
    )


def _limits(field: FieldInfo) -> tuple[float, float]:
    """The lowest and the highest value that a setting may have at all; a whole number above 0 begins at 1."""
    least, most = -math.inf, math.inf
    step = 1 if field.annotation is int else 0
    for limit in field.metadata:
        least = max(least, getattr(limit, "ge", -math.inf), getattr(limit, "gt", -math.inf) + step)
        most = min(most, getattr(limit, "le", math.inf), getattr(limit, "lt", math.inf) - step)
    return least, most


# A study's space as the study has widened it: its own steps, and those of earlier studies that it began from.


def space_of(study: StudyRecord) -> Space:
    """The space of a study as it is now: as its file or the catalog has it, widened by the study's steps.

    Raises:
        UserError: if the space's file is gone or was edited into something else.
    """
    return widen_again(load_space(study.space_file or study.space), study.grown)


def widen_again(space: Space, grown: Iterable[GrownAxis]) -> Space:
    """The space, widened by the steps of a study whose space it was when the study began."""
    for step in grown:
        space.widen(step.axis, step.value)
    return space


def widen_as_earlier(space: Space, earlier: Iterable[tuple[str, StudyRecord]]) -> tuple[GrownAxis, ...]:
    """Widens the space by those steps of earlier studies that go on from its ends, and returns these steps.

    What earlier studies have found beyond the ends is then no loss to this one.

    Args:
        space: the space of a study that begins.
        earlier: names of the earlier studies' directories, and their records.
    """
    taken = []
    for directory, record in earlier:
        for step in record.grown:
            axes = {axis.setting: axis for axis in ordered_axes(space)}
            axis = axes.get(step.axis)
            if axis is None or axis.ends[step.highest] != step.before:
                continue
            with contextlib.suppress(
                UserError
            ):  # layers of their own have no axis that another one could have
                space.widen(step.axis, step.value)
                taken.append(step.replace(earlier=directory, completed=0, first={}))
    return tuple(taken)


EVERY = 4
"""Number of completed candidates between two looks: an assumption, not measured."""
FIRST_LOOK = 12
"""Number of completed candidates before the first look, as many as the ranker draws at random: an assumption."""
MOST_STEPS = 3
"""Largest number of steps at one end of an axis: an assumption, not measured."""
BEST = 6
"""Number of candidates of lowest NE that are looked at: an assumption, not measured."""
NEARLY_ALL = 0.8
"""Share of the networks with an axis from which an end counts; of three or four, more than half may be chance: an
assumption, not measured. The sentence on edges (`dashboards.edges`) asks for more than half."""
SHARE_OF_REST = 0.1
"""Largest share of the minutes left that a candidate beyond an end may be expected to train: an assumption."""
MOST_TIMES = 2.0
"""Largest time that a candidate beyond an end may be expected to train if there are no minutes, over that of
the longest training so far: an assumption."""

LOG = logging.getLogger(__name__)


class Growth:
    """Widens the space of one study."""

    def __init__(
        self,
        *,
        space: Space,
        state: StudyState,
        admission: Admission,
        job_of: Callable[[Candidate], Job],
        minutes: float | None,
        commit: Callable[[GrownAxis], None],
    ) -> None:
        """Growth that goes on from the steps that the study has taken so far (`StudyRecord.grown`).

        Args:
            space: the study's space, as it is now.
            state: state of the study, whose head says whether it grows at all.
            admission: plans candidates, and holds them against the limits of serving and of table bytes.
            job_of: makes the study's job of a candidate.
            minutes: the study's budget; None for no limit.
            commit: notes a step in the ledger, and has all know it who hold what follows from the space.
        """
        self._space, self._state, self._admission = space, state, admission
        self._job_of, self._minutes, self._commit = job_of, minutes, commit
        # a look that was interrupted is made again, from what had completed then
        self._looks = (len(self._completed()) - 1) // EVERY

    def look(self) -> None:
        """Widens one axis if it is time to look and the best sit at an end of it."""
        if not self._state.head.grows:
            return
        completed = self._completed()
        count = len(completed)
        if count < FIRST_LOOK or count // EVERY <= self._looks:
            return
        self._looks = count // EVERY
        if any(step.completed >= self._looks * EVERY for step in self._state.head.grown):
            return
        grown = next(self._steps(completed), None)
        if grown is None:
            return
        widen_again(self._space, [grown])
        self._commit(grown)
        sentence = widened_now(grown)
        # printed before it is logged, so whatever the log has was printed
        self._state.say(sentence)
        LOG.info("%s", sentence)

    def start_point(self, candidates: Sequence[TrialRecord]) -> Point:
        """The first candidate of a step that was taken and has none among these; empty if all have."""
        points = [trial.point for trial in candidates]
        firsts = (step.first for step in self._state.head.grown)
        return next((first for first in firsts if first and first not in points), {})

    def _completed(self) -> list[TrialRecord]:
        """Candidates of the space that have a result."""
        return [trial for trial in eligible(self._state.candidates) if not trial.outside_space]

    def _steps(self, completed: Sequence[TrialRecord]) -> Iterator[GrownAxis]:
        """Steps that may be taken, for the best by NE before those for the front, which has upper ends alone."""
        # what waits for the tuning stage is not widened: candidates of the search have its first value
        axes = {axis.name: axis for axis in ordered_axes(self._space) if not axis.tuned_last}
        # equal jobs have one result: it sits at an end once
        best, front = sorted(own(completed), key=ne_of)[:BEST], front_of(completed)
        # the front's cheap half sits at lower ends whatever the log: widened there, the study found a higher NE
        upper = (edge for edge in edges_of(axes.values(), front) if edge.highest)
        for edge in (*edges_of(axes.values(), best), *upper):
            if edge.count < NEARLY_ALL * edge.having:
                continue
            axis = axes[edge.axis]
            at_end = (
                trial for trial in (*best, *reversed(front)) if is_at_end(axis, trial, highest=edge.highest)
            )
            step = self._step(edge, axis, sorted(at_end, key=ne_of), completed)
            if step is not None:
                yield step

    def _step(
        self, edge: Edge, axis: OrderedAxis, at_end: Sequence[TrialRecord], completed: Sequence[TrialRecord]
    ) -> GrownAxis | None:
        """The step beyond an edge; None if it is at its limit, or no candidate beyond it may train."""
        taken = sum(
            (step.axis, step.highest) == (axis.setting, edge.highest) for step in self._state.head.grown
        )
        if taken >= MOST_STEPS or (axis.part == DEPTH and self._space.config.layers == "each"):
            return None
        held = next(held for held in self._space.axes if held.name == axis.name)
        value = value_beyond(held, highest=edge.highest)
        if value is None:
            return None
        for trial in at_end:
            moved = first_label_beyond(held, value, highest=edge.highest)
            point = trial.point | {axis.name: moved}
            reason = self._refused(axis.setting, value, point, trial, completed)
            if reason is None:
                return GrownAxis(
                    axis=axis.setting,
                    highest=edge.highest,
                    before=edge.end,
                    end=label(value),
                    value=value,
                    count=edge.count,
                    having=edge.having,
                    completed=len(completed),
                    first=point,
                )
            LOG.info("%s is not widened to %s: %s", axis.setting, label(value), reason)
        return None

    def _refused(
        self,
        setting: str,
        value: int | float | tuple[int, ...],
        point: Point,
        before: TrialRecord,
        completed: Sequence[TrialRecord],
    ) -> str | None:
        """Why a candidate beyond an end may not train; None if it may. `before` is the same at the end."""
        wider = copy.copy(self._space)
        try:
            wider.widen(setting, value)
            job = self._job_of(wider.decode(point))
        except UserError as error:
            return str(error)
        if any(trial.job.fingerprint == job.fingerprint for trial in completed):
            return "it changes no network"
        record = new_record(len(self._state.trials), TrialKind.CANDIDATE, point, job)
        record = self._admission.admit_by_size(record, job)
        if record.result.outcome is Outcome.INFEASIBLE:
            return record.result.error or "it is over a limit of serving or of table bytes"
        step_seconds = self._admission.execution.step_seconds
        ours, theirs = step_seconds(record), step_seconds(before)
        times = ours / theirs if ours and theirs else (record.job.flops or 1.0) / (before.job.flops or 1.0)
        # steps that take as long as those of one that is alike
        other = TrainingConfig.model_validate(before.job.training)
        alike = before.result.training_seconds * _steps_per_row(job.training) / _steps_per_row(other)
        if self._minutes is not None:
            most = SHARE_OF_REST * max(0.0, 60.0 * self._minutes - self._state.elapsed_seconds())
        else:  # by the longest training so far; without any limit if no training took time
            most = MOST_TIMES * max(trial.result.training_seconds for trial in completed) or math.inf
        if times * alike > most:
            return (
                f"a training is expected to take {times * alike:.0f} s, at most {most:.0f} s are given to it"
            )
        return None


def _steps_per_row(training: TrainingConfig) -> float:
    assert training.epochs != "auto", "jobs have a number of passes"
    assert training.batch_size is not None
    return training.epochs / training.batch_size
