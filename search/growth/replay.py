"""A study's space as the study has widened it: its own steps, and those of earlier studies that it began from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from dhen.errors import UserError
from search.ordered_axes import ordered_axes
from spaces.catalog_loader import load_space
from spaces.space import Space
from trials.study_record import GrownAxis, StudyRecord


def space_of(study: StudyRecord) -> Space:
    """The space of a study as it is now: as its file or the catalog has it, widened by the study's steps.

    Raises:
        UserError: where the space's file is gone or was edited into something else.
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
