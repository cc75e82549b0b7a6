"""A sentence on the edges of the space at which the front sits."""

from __future__ import annotations

from dashboards.edges import Edge, edges
from trials.study_record import StudyRecord

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
    axes = "A wider axis" if len(found) == 1 else "Wider axes"
    return (
        f"The front's best sit on the edge of the space: {named}{more}. {axes} may hold better ones: "
        f"copy the space ({where}) and widen it."
    )


def _words(edge: Edge) -> str:
    end = f"{edge.end:g}" if isinstance(edge.end, float) else str(edge.end)
    return (
        f"{edge.axis} at its {'highest' if edge.highest else 'lowest'}, {end} ({edge.count} of {edge.having})"
    )
