"""How memory techniques look: a colour for each way to hold the dense state, a shape for each technique.

A technique's name is a strategy's (`trials.strategy`), such as `hsdp+cpu_offload`. Its colour is that of its way
to hold the dense state, so that it is the same in every figure of every study.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dashboards.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, YELLOW
from trials.record import TrialKind
from trials.study_record import StudyRecord


class Look(NamedTuple):
    """Colour and symbol of one technique, the dash of its lines and the pattern of its bars."""

    color: str
    symbol: str
    dash: str
    pattern: str = ""


LOOKS = {
    "dp": Look(GREY, "circle", "solid"),
    "zero1": Look(SKY, "square", "dot"),
    "zero2": Look(GREEN, "triangle-down", "dash"),
    "zero_offload": Look(YELLOW, "x", "dashdot"),
    "shard_grad_op": Look(ORANGE, "triangle-right", "longdash"),
    "hsdp": Look(PURPLE, "diamond", "solid"),
    "fsdp": Look(BLUE, "cross", "longdashdot"),
}
"""Looks of the ways to hold the dense state by themselves, in the order of the ladder."""
NAMES = {
    "dp": "DP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero_offload": "ZeRO-Offload",
    "shard_grad_op": "shard_grad_op",
    "hsdp": "HSDP",
    "fsdp": "FSDP",
}
"""What the ways to hold the dense state are called in papers."""
COMBINED = (
    "pentagon",
    "hourglass",
    "hexagon2",
    "bowtie",
    "star-diamond",
    "octagon",
    "star-square",
    "hexagram",
)
"""Symbols of techniques that join several, in turn."""
DASHES = ("dot", "dash", "dashdot", "longdash")
PATTERNS = ("/", "\\", "-", "|", "+", ".")


def study_techniques(record: StudyRecord) -> tuple[str, ...]:
    """All techniques that trials of a study were planned for or trained with, in the order of the ladder: figures
    take looks of all of them, so that each looks the same in every figure of a study."""
    networks = [trial for trial in record.trials if trial.kind is not TrialKind.AVERAGE]
    planned = (trial.plan.unsized_technique for trial in networks)
    trained = (
        attempt.unsized_strategy for trial in (*networks, *record.retrainings) for attempt in trial.attempts
    )
    at_work = (trial.result.technique for trial in networks if not trial.attempts)
    return in_order(name for name in (*planned, *trained, *at_work) if name is not None)


def dense_of(technique: str) -> str:
    """The way in which a technique holds the dense state: `hsdp` of `hsdp+cpu_offload`."""
    first = technique.partition("+")[0]
    return first if first in LOOKS else "dp"


def in_order(techniques: Iterable[str]) -> tuple[str, ...]:
    """Different techniques in the order of the ladder: those that join fewer come first."""
    ways = tuple(LOOKS)

    def rank(name: str) -> tuple[int, int, str]:
        return _size(name), ways.index(dense_of(name)), name

    return tuple(sorted(set(techniques), key=rank))


def looks(techniques: Iterable[str]) -> dict[str, Look]:
    """The look of each technique, in the order of the ladder; no two have the same symbol, up to fifteen."""
    found: dict[str, Look] = {}
    combined = 0
    for name in in_order(techniques):
        look = LOOKS[dense_of(name)]
        if name not in LOOKS:
            look = look._replace(
                symbol=COMBINED[combined % len(COMBINED)],
                dash=DASHES[combined % len(DASHES)],
                pattern=PATTERNS[combined % len(PATTERNS)],
            )
            combined += 1
        found[name] = look
    return found


def _size(technique: str) -> int:
    """Number of techniques joined: plain DP is none, nor is how gradients of micro-batches are sent."""
    return len(set(technique.split("+")) - {"dp", "no_sync"})
