"""Where the front sits on the edge of the space, so that better candidates may lie beyond it."""

from __future__ import annotations

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
    """The candidates on the front, alone or as members of an average there."""
    networks = (network for number in record.front for network in record.networks(record.trial(number)))
    return tuple(
        {network.number: network for network in networks if network.kind is TrialKind.CANDIDATE}.values()
    )


def edges(record: StudyRecord) -> tuple[Edge, ...]:
    """Ends of axes at which more than half of the front's networks sit, three or more, where a wider space could
    go further; the clearest first."""
    networks = front_networks(record)
    found = [edge for axis in record.axes for edge in _edges(axis, networks)]
    return tuple(sorted(found, key=lambda edge: -edge.count / edge.having))


def _edges(axis: OrderedAxis, networks: tuple[TrialRecord, ...]) -> list[Edge]:
    drawn = (axis.position(value) for trial in networks if (value := axis.value(trial)) is not None)
    positions = [position for position in drawn if position is not None]
    counts = {
        False: sum(position <= NEAR_END for position in positions) if axis.open_below else 0,
        True: sum(position >= 1 - NEAR_END for position in positions) if axis.open_above else 0,
    }
    return [
        Edge(axis=axis.name, highest=highest, end=axis.ends[highest], count=count, having=len(positions))
        for highest, count in counts.items()
        if count >= FEWEST and 2 * count > len(positions)
    ]
