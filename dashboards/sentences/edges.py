"""Sentences on the edges of the space: where the front sits on one, and how the study has widened it."""

from __future__ import annotations

from dashboards.edges import Edge, edges, front_networks
from trials.ordered_axis import Setting
from trials.record import TrialRecord
from trials.study_record import GrownAxis, StudyRecord

NAMED = 5
"""Largest number of edges that are named."""


def on_the_edge(record: StudyRecord) -> str | None:
    """At which ends of axes the front's networks sit, and what to do; None where they sit at none."""
    found = edges(record)
    if not found:
        return None
    named = ", ".join(map(_words, found[:NAMED]))
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
    where it has widened none."""
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


def _words(edge: Edge) -> str:
    side = "highest" if edge.highest else "lowest"
    return f"{edge.axis} at its {side}, {_value(edge.end)} ({edge.count} of {edge.having})"


def _value(end: Setting) -> str:
    return f"{end:g}" if isinstance(end, float) else str(end)
