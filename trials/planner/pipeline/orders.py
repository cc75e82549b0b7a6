"""Who computes what when in a pipeline: each rank's passes, one after another, under each schedule.

- `gpipe` (arXiv 1811.06965): all micro-batches forward, then all backward.
- `1f1b` (PipeDream-Flush, arXiv 2006.09503): as soon as it can, a stage goes backward, so that it holds no more
  micro-batches than there are stages behind it.
- `interleaved` (arXiv 2104.04473): each rank has two stages that are apart in the model, so that the pipeline
  fills with half as much at a time.
- `zero_bubble` (ZB1P of arXiv 2401.10241): backward comes in two passes, of which the one for weights waits until
  there is nothing else to do.

These are the orders of `torch.distributed.pipelining`, whose schedules run; a test holds them to what those do.
They are here too because importing torch's takes most of a second, and a plan milliseconds.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal, NamedTuple

from trials.strategy import CHUNKS_PER_RANK, Schedule

Kind = Literal["F", "B", "I", "W"]


class Pass(NamedTuple):
    """One micro-batch's way through a stage."""

    kind: Kind
    """F: forward. B: backward. I: the part of backward that is for the stage's inputs; W: that for its weights."""
    stage: int
    micro_batch: int


@lru_cache(maxsize=256)
def orders(schedule: Schedule, ranks: int, micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Returns each rank's passes in their order; stage s is on rank s modulo `ranks`."""
    if schedule == "gpipe":
        return tuple(
            tuple(Pass(kind, rank, number) for kind in ("F", "B") for number in range(micro_batches))
            for rank in range(ranks)
        )
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks))
    return tuple(_in_rounds(schedule, rank, ranks, micro_batches) for rank in range(ranks))


class Held(NamedTuple):
    """How many micro-batches a rank holds of each of its stages when a pass begins."""

    kind: Kind
    stage: int
    """The stage of the pass, by its place among the rank's."""
    held: tuple[int, ...]
    """Micro-batches that have gone forward through each of the rank's stages and not all the way back."""


@lru_cache(maxsize=4096)
def most_held(schedule: Schedule, ranks: int, micro_batches: int, rank: int) -> tuple[Held, ...]:
    """Returns the moments of a rank's step in which most is held: of each kind of pass through each stage, those
    that no other surpasses."""
    held, found = [0] * CHUNKS_PER_RANK[schedule], set[Held]()
    for kind, stage, _ in orders(schedule, ranks, micro_batches)[rank]:
        chunk = stage // ranks
        found.add(Held(kind, chunk, tuple(held)))
        held[chunk] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
    return tuple(
        one
        for one in found
        if not any(
            other[:2] == one[:2] and other != one and all(map(int.__ge__, other.held, one.held))
            for other in found
        )
    )


def wrong_micro_batches(schedule: Schedule, ranks: int, micro_batches: int) -> str | None:
    """Says why a schedule cannot run with so many micro-batches; None where it can."""
    if micro_batches == 1:
        return "with one micro-batch all ranks but one would always wait"
    if schedule == "1f1b" and micro_batches < ranks:
        return f"1f1b keeps {ranks} stages busy with {ranks} micro-batches or more"
    if schedule in ("interleaved", "zero_bubble") and micro_batches % max(1, micro_batches // ranks):
        return f"{schedule} goes in rounds that have to be equally long"
    return None


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Pass, ...]:
    ahead = min(micro_batches, stages - stage)
    passes = [Pass("F", stage, number) for number in range(ahead)]
    for number in range(micro_batches):
        passes.append(Pass("B", stage, number))
        if ahead + number < micro_batches:
            passes.append(Pass("F", stage, ahead + number))
    return tuple(passes)


def _in_rounds(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> tuple[Pass, ...]:
    """Returns a rank's passes where micro-batches go in rounds through each of its stages in turn."""
    chunks, apart = CHUNKS_PER_RANK[schedule], schedule == "zero_bubble"
    in_round = micro_batches // max(1, micro_batches // ranks)
    every = chunks * micro_batches
    ahead = min(every, (chunks - 1) * in_round + (1 if apart else 2) * (ranks - 1 - rank))
    taken: Counter[tuple[Kind, int]] = Counter()

    def following(kind: Kind, step: int) -> Pass:
        chunk = step // in_round % chunks
        stage = (chunk if kind == "F" else chunks - 1 - chunk) * ranks + rank
        taken[kind, stage] += 1
        return Pass(kind, stage, taken[kind, stage] - 1)

    passes = [following("F", step) for step in range(ahead)]
    weights = 0
    for step in range(every):
        if ahead + step < every:
            passes.append(following("F", ahead + step))
        passes.append(following("I" if apart else "B", step))
        if apart and step >= rank:
            passes.append(following("W", weights))
            weights += 1
    passes += [following("W", step) for step in range(weights, every if apart else 0)]
    return tuple(passes)
