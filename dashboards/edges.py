"""Where the front sits on the edge of the space, so that better candidates may lie beyond it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trials.ordered_axis import NEAR_END, OrderedAxis, Setting
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord

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
    found = [edge for axis in axes for edge in _edges(axis, networks)]
    return tuple(sorted(found, key=lambda edge: -edge.count / edge.having))


def is_at_end(axis: OrderedAxis, trial: TrialRecord, *, highest: bool) -> bool:
    """Whether a network sits at this end of an axis."""
    value = axis.value(trial)
    position = axis.position(value) if value is not None else None
    return position is not None and (position >= 1 - NEAR_END if highest else position <= NEAR_END)


def _edges(axis: OrderedAxis, networks: Collection[TrialRecord]) -> list[Edge]:
    values = ((trial, axis.value(trial)) for trial in networks)
    having = [trial for trial, value in values if value is not None and axis.position(value) is not None]
    open_ends = [highest for highest in (False, True) if (axis.open_above if highest else axis.open_below)]
    counts = {
        highest: sum(is_at_end(axis, trial, highest=highest) for trial in having) for highest in open_ends
    }
    return [
        Edge(axis=axis.name, highest=highest, end=axis.ends[highest], count=count, having=len(having))
        for highest, count in counts.items()
        if count >= FEWEST and 2 * count > len(having)
    ]
