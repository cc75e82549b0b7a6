"""The duration of a step on pipelines: the passes of the schedule that will run, played on a clock for each rank.

Sends between stages are priced by the link that they cross, and are what passes wait for; the time in which the
busiest rank waits is the bubble. Gradients are averaged over data ranks when the last pass has ended, and hide
behind nothing. Embeddings that a pipeline's ranks have looked up reach its first stage before the first pass, and
their gradients go back after the last.

Left out: that ranks of a CPU that wait leave it to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from trials.planner.collectives import NOTHING, AlphaBeta, collectives, send
from trials.planner.estimates import StepTime
from trials.planner.pipeline.cut import stages_of
from trials.planner.pipeline.timeline import StageSeconds, played
from trials.planner.time.step_time import (
    Parts,
    Step,
    all_reduce_seconds,
    publication_seconds,
    reduction,
    unit_buckets,
    update_seconds,
)
from trials.strategy import RECOMPUTED, Strategy

SPLIT = 0.5
"""Share of backward that the pass for inputs takes, where backward comes in two: a product has two that are as
large."""


class Sent(NamedTuple):
    """What a pipeline's ranks send each other."""

    boundaries: tuple[int, ...]
    """Bytes of a micro-batch behind each stage but the last."""
    embeddings: int
    """Bytes of the embeddings of all of a pipeline's examples."""


def pipeline_time(step: Step, strategy: Strategy, layers_per_stage: Sequence[int], sent: Sent) -> StepTime:
    """Returns the seconds of a strategy with pipelines, itemised.

    Args:
        step: what all strategies with as large micro-batches share.
        strategy: how the model is held.
        layers_per_stage: where it is cut.
        sent: what is sent.
    """
    ranks, micro_batches = strategy.pipeline, strategy.micro_batches
    data_ranks, stages = step.cluster.ranks // ranks, stages_of(layers_per_stage)
    seconds = [_passes(step, strategy, layers, stages[-1].stop) for layers in stages]
    links = [_link(step, ranks, data_ranks, number % ranks) for number in range(len(stages) - 1)]
    timed = tuple(
        StageSeconds(
            forward=of.forward,
            backward=of.backward + of.again,
            of_inputs=of.again + SPLIT * of.backward,
            of_weights=(1 - SPLIT) * of.backward,
            send=links[number](sent.boundaries[number]) if number < len(links) else 0.0,
        )
        for number, of in enumerate(seconds)
    )
    clock = _played(strategy.schedule, ranks, micro_batches, timed)
    busiest = max(range(ranks), key=clock.busy.__getitem__)
    of_busiest = seconds[busiest::ranks]
    largest = _largest(step, stages, ranks, data_ranks)
    reduced = _reduced(largest, strategy, data_ranks)
    hop = max((link for link in links), key=lambda link: link.beta, default=NOTHING)
    exchanged = 2 * hop(sent.embeddings * (ranks - 1) / ranks) if sent.embeddings else 0.0
    lookup = step.lookup if step.costs is None else micro_batches * step.lookup / ranks
    tables = step.all_to_all, step.tables_reduce
    if step.shared is not None:
        lookup, tables = step.shared.replicated_tables, (step.shared.sharded_tables, 0.0)
    items = {
        "forward": micro_batches * sum(of.forward for of in of_busiest),
        "backward": micro_batches * sum(of.backward for of in of_busiest),
        "recomputation": micro_batches * sum(of.again for of in of_busiest),
        "bubble": clock.seconds - clock.busy[busiest],
        "lookup": lookup,
        "optimizer": update_seconds(largest, strategy),
        "all_to_all": tables[0],
        "stage_transfer": exchanged,
        "all_gather": publication_seconds(largest, strategy),
        "reduce_scatter": reduced if strategy.dense == "zero1" else 0.0,
        "all_reduce": tables[1] + (reduced if strategy.dense == "dp" else 0.0),
        "host_transfer": 0.0,
    }
    return StepTime(**items, hidden=0.0, total=sum(items.values()))


class _Passes(NamedTuple):
    """Seconds of a micro-batch in one stage."""

    forward: float
    backward: float
    again: float
    """Seconds of recomputation."""


_played = lru_cache(maxsize=1024)(played)


def _passes(step: Step, strategy: Strategy, layers: range, count: int) -> _Passes:
    ends = layers.start == 0, layers.stop == count
    recomputed = set(range(count)[RECOMPUTED[strategy.checkpointing]])
    besides = step.besides
    if step.shared is not None:
        besides += step.shared.counting
    of_layers = slice(layers.start, layers.stop)
    return _Passes(
        _of(step.forward, of_layers, ends) + besides * len(layers) / count,
        _of(step.backward, of_layers, ends),
        sum(step.forward.layers[index] for index in layers if index in recomputed),
    )


def _of(parts: Parts, layers: slice, ends: tuple[bool, bool]) -> float:
    return parts.before * ends[0] + sum(parts.layers[layers]) + parts.after * ends[1]


def _link(step: Step, ranks: int, data_ranks: int, rank: int) -> AlphaBeta:
    """Returns the link from a rank of pipelines to the next, the slowest of all pipelines."""
    per_host = step.cluster.gpus_per_host
    here, there = rank * data_ranks, (rank + 1) % ranks * data_ranks
    crosses = any((here + data) // per_host != (there + data) // per_host for data in range(data_ranks))
    return send(step.cluster, across_hosts=crosses)


def _largest(step: Step, stages: Sequence[range], ranks: int, data_ranks: int) -> Step:
    """Returns the step of the rank that has the most parameters, among the data ranks of its stages."""
    count = stages[-1].stop

    def of(parts: Parts, rank: int) -> Parts:
        own = stages[rank::ranks]
        layers = [parts.layers[index] for layers in own for index in layers]
        return Parts(
            parts.before if own[0].start == 0 else 0.0, layers, parts.after if own[-1].stop == count else 0.0
        )

    fullest = max(range(ranks), key=lambda rank: of(step.parameters, rank).total)
    own = of(step.parameters, fullest)
    per_host = min(data_ranks, step.cluster.gpus_per_host)
    group = collectives(step.cluster, -(-data_ranks // per_host), per_host)
    share = own.total / step.parameters.total if step.parameters.total else 0.0
    return step._replace(parameters=own, everywhere=group, tensors=round(share * step.tensors))


def _reduced(largest: Step, strategy: Strategy, data_ranks: int) -> float:
    """Returns the seconds in which gradients are averaged over data ranks."""
    if data_ranks == 1:
        return 0.0
    values = (largest.parameters.before, *largest.parameters.layers, largest.parameters.after)
    if strategy.dense == "dp":
        return all_reduce_seconds(largest, largest.itemsizes.computed * sum(values))
    buckets = unit_buckets(largest, strategy)
    each = [reduction(largest, strategy, sum(values[place] for place in bucket)) for bucket in buckets]
    return sum(bucket.copy_in + bucket.scatter for bucket in each)
