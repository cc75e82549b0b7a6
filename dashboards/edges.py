"""Where the front sits on the edge of the space, so that better candidates may lie beyond it, and how the study
has widened the space, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trials.records.findings import NEAR_END, OrderedAxis, Setting
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.trial_record import TrialKind, TrialRecord

FEWEST = 3
"""Smallest number of networks that must sit at an end: of one or two it may be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An end of an ordered axis at which more than half of the front's networks sit."""

    axis: str
    highest: bool
    """Whether the end is the upper one."""
    end: Setting
    """The axis's value at this end."""
    count: int
    """Number of the front's networks at this end."""
    having: int
    """Number of the front's networks that have the axis."""


def front_networks(record: StudyRecord) -> tuple[TrialRecord, ...]:
    """The candidates on the front, alone or as members of an average there, and what learnt from one."""
    networks = (network for number in record.front for network in record.networks(record.trial(number)))
    return tuple(
        {
            network.number: network
            for network in networks
            if network.kind in (TrialKind.CANDIDATE, TrialKind.DISTILLED)
        }.values()
    )


def edges(record: StudyRecord) -> tuple[Edge, ...]:
    """Ends of axes at which more than half of the front's networks sit, three or more, where a wider space could
    go further; the clearest first."""
    return edges_of(record.axes, front_networks(record))


def edges_of(axes: Iterable[OrderedAxis], networks: Collection[TrialRecord]) -> tuple[Edge, ...]:
    """Ends of these axes at which more than half of the networks sit that have the axis, three or more."""
    found = []
    for axis in axes:
        values = ((trial, axis.value(trial)) for trial in networks)
        having = [trial for trial, value in values if value is not None and axis.position(value) is not None]
        for highest in (False, True):
            count = sum(is_at_end(axis, trial, highest=highest) for trial in having)
            is_open = axis.open_above if highest else axis.open_below
            if is_open and count >= FEWEST and 2 * count > len(having):
                end = axis.ends[highest]
                found.append(Edge(axis=axis.name, highest=highest, end=end, count=count, having=len(having)))
    return tuple(sorted(found, key=lambda edge: -edge.count / edge.having))


def is_at_end(axis: OrderedAxis, trial: TrialRecord, *, highest: bool) -> bool:
    """Whether a network sits at this end of an axis."""
    value = axis.value(trial)
    position = axis.position(value) if value is not None else None
    return position is not None and (position >= 1 - NEAR_END if highest else position <= NEAR_END)


NAMED = 5
"""Largest number of edges that are named."""


def on_the_edge(record: StudyRecord) -> str | None:
    """At which ends of axes the front's networks sit, and what to do; None if they sit at none."""
    found = edges(record)
    if not found:
        return None
    named = ", ".join(
        f"{edge.axis} at its {'highest' if edge.highest else 'lowest'}, {_value(edge.end)} "
        f"({edge.count} of {edge.having})"
        for edge in found[:NAMED]
    )
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    where = record.space_file or f"`dhen-search spaces {record.space}`"
    axes, it = ("A wider axis", "it") if len(found) == 1 else ("Wider axes", "them")
    widen = f"copy the space ({where}) and widen {it}."
    if record.grows:
        widen = (
            f"with more candidates (trials=, minutes=) the study may widen {it} by itself, as far as memory, "
            f"serving and budget allow; or {widen}"
        )
    return (
        f"The front's best sit on the edge of the space: {named}{more}. {axes} may hold better ones: {widen}"
    )


def widened(record: StudyRecord) -> str | None:
    """Which axes the study has widened, and how many of the front's networks lie beyond the ends before; None
    if it has widened none."""
    if not record.grown:
        return None
    first: dict[tuple[str, bool], GrownAxis] = {}
    last: dict[tuple[str, bool], GrownAxis] = {}
    for step in record.grown:
        first.setdefault((step.axis, step.highest), step)
        last[step.axis, step.highest] = step
    named = ", ".join(
        f"{axis} {_way(highest)} {_value(step.end)} in place of {_value(first[axis, highest].before)}"
        for (axis, highest), step in last.items()
    )
    networks = front_networks(record)
    beyond = sum(any(_is_beyond(record, trial, step) for step in first.values()) for trial in networks)
    sources = ", ".join(dict.fromkeys(step.earlier for step in record.grown if step.earlier is not None))
    as_in = f" (in part as in {sources})" if sources else ""
    return (
        f"Axes of the space were widened where the best sat on their ends{as_in}: {named}. Of the front's "
        f"{len(networks)} networks {beyond} lie beyond the ends before."
    )


def widened_now(step: GrownAxis) -> str:
    """What a study says when it widens an axis."""
    side = "highest" if step.highest else "lowest"
    return (
        f"the space is widened: {step.axis} goes {_way(step.highest)} {_value(step.end)} from now on, for "
        f"{step.count} of {step.having} of the best networks are at its {side}, {_value(step.before)}"
    )


def _is_beyond(record: StudyRecord, trial: TrialRecord, step: GrownAxis) -> bool:
    """Whether a network lies beyond the end that a step has gone beyond."""
    for axis in record.axes:
        value = axis.value(trial) if axis.setting == step.axis else None
        place = axis.position(value) if value is not None else None
        end = axis.position(step.before)
        if place is not None and end is not None and (place > end if step.highest else place < end):
            return True
    return False


def _way(highest: bool) -> str:
    return "up to" if highest else "down to"


def _value(end: Setting) -> str:
    return f"{end:g}" if isinstance(end, float) else str(end)
