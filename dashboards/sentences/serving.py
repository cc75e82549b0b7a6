"""What the limits of serving left of a study, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from dashboards.units import byte_size, milliseconds, si
from trials.record import StudyRecord, TrialRecord


def over_limits(record: StudyRecord) -> str | None:
    """How many candidates are over them; where all are, the least that was seen of each thing."""
    judged = [trial for trial in record.candidates if trial.serving_excess is not None]
    over = sum((trial.serving_excess or 0.0) > 0 for trial in judged)
    limits = f"limits of serving ({record.serving.request}: {record.serving.limits})"
    if not over:
        return None
    if over < len(judged):
        return f"{over} of {len(judged)} candidates are over the {limits} and were not trained."
    return (
        f"No candidate meets the {limits}: of {len(judged)} that were seen, {', '.join(_least(record, judged))}. "
        "Raise the limits, or search a space with smaller models."
    )


def _least(record: StudyRecord, judged: list[TrialRecord]) -> Iterator[str]:
    """Of what has a limit; times only of those that met the others."""
    times = [trial.serving_ms for trial in judged if trial.serving_ms is not None]
    if times:
        yield f"the fastest takes {milliseconds(min(times))}"
    if record.serving.max_bytes is not None:
        yield f"the smallest has {byte_size(min(trial.weights_bytes or 0 for trial in judged))} of weights"
    if record.serving.max_flops is not None:
        yield f"the cheapest needs {si(min(trial.flops or 0.0 for trial in judged))} FLOPs an example"
