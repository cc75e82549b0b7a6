"""The seconds that ranks which split modules send each other, while they compute nothing.

Sums of outputs and of gradients, and gathered outputs, as tapes have them (`dhen.memory.tape.Sent`), priced by
the links of a tensor group: those in a host where the host has all its ranks, else the network too. What is
recomputed is sent again. Once a step the group gathers what its ranks looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trials.cluster.cluster import Cluster
from trials.planner.collectives import AlphaBeta, Collectives, collectives
from trials.planner.segments import Segment
from trials.strategy import RECOMPUTED, Strategy


class Seconds(NamedTuple):
    """Seconds of a kind of collective in one micro-batch, by segment: features, layers, head."""

    forward: list[float]
    backward: list[float]

    def of(self, strategy: Strategy) -> float:
        """Returns the seconds in a step."""
        again = self.forward[1:-1][RECOMPUTED[strategy.checkpointing]]
        return strategy.micro_batches * (sum(self.forward) + sum(self.backward) + sum(again))


class SentBySplit(NamedTuple):
    """What a tensor group sends."""

    all_reduce: Seconds
    all_gather: Seconds
    inputs: AlphaBeta
    """The cost of gathering inputs."""
    input_bytes: int
    """Bytes of a micro-batch's inputs, which are gathered for all micro-batches at once."""


def among(cluster: Cluster, degree: int) -> Collectives:
    """Returns the collectives among the ranks of a tensor group."""
    hosts = max(1, degree // cluster.gpus_per_host)
    return collectives(cluster, hosts, degree // hosts)


def sent_by_split(segments: Sequence[Segment], cluster: Cluster, degree: int, examples: int) -> SentBySplit:
    """Returns what is sent for micro-batches of so many examples."""
    group = among(cluster, degree)
    return SentBySplit(
        _seconds(segments, "all_reduce", group.all_reduce, examples),
        _seconds(segments, "all_gather", group.all_gather.__call__, examples),
        group.all_gather,
        segments[0].footprint.input,
    )


def split_seconds(sent: SentBySplit, strategy: Strategy) -> tuple[float, float]:
    """Returns the seconds of all-reduces and of all-gathers in a step."""
    inputs = sent.inputs(strategy.micro_batches * sent.input_bytes)
    return sent.all_reduce.of(strategy), sent.all_gather.of(strategy) + inputs


def _seconds(segments: Sequence[Segment], kind: str, run: Callable[[float], float], examples: int) -> Seconds:
    found = Seconds([0.0] * len(segments), [0.0] * len(segments))
    for place, segment in enumerate(segments):
        for one in segment.sent:
            if one.kind == kind:
                seconds = found.forward if one.forward else found.backward
                seconds[place] += run(one.size.each * examples + one.size.fixed)
    return found
