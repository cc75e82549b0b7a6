"""The duration of a step on pipelines: the passes of the schedule that will run, played on a clock for each rank.

Sends between stages are priced by the link that they cross, and are what passes wait for; the time in which
the busiest rank waits is the bubble. Gradients are averaged over data ranks when the last pass has ended, and
hide behind nothing. Embeddings that a pipeline's ranks have looked up reach its first stage before the first
pass, and their gradients go back after the last. What tensor groups in a stage send each other takes its ranks
as long as compute does, pass by pass.

Left out: that ranks of a CPU that wait leave it to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from trials.planner.collectives import NOTHING, AlphaBeta, collectives, send
from trials.planner.estimates import StepTime
from trials.planner.overlap import Seconds
from trials.planner.pipeline_memory import orders, stages_of
from trials.planner.step_time import (
    Parts,
    Step,
    all_reduce_seconds,
    publication_seconds,
    reduction,
    unit_buckets,
    update_seconds,
)
from trials.records.strategy import RECOMPUTED, Schedule, Strategy

# The bubble: a pipeline's passes played out on a clock for each rank, in the order in which they will run.
#
# A pass begins when its rank has done the one before, and what it needs has arrived from the stage before it
# (forward) or behind it (backward). With p equal stages, m micro-batches and nothing to send a rank computes for
# m / (m + p - 1) of the time under GPipe and 1F1B.
#
# Left out: that a send takes from the compute beside it.


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in one stage."""

    forward: float
    backward: float
    """Seconds of backward, recomputation included."""
    of_inputs: float
    """Seconds of the pass for inputs, where backward comes in two."""
    of_weights: float
    send: float
    """Seconds in which the stage's output reaches the next stage, and its gradient comes back."""


class Played(NamedTuple):
    """A step's passes on the clock."""

    seconds: float
    """Seconds from the first pass until the last one has ended."""
    busy: tuple[float, ...]
    """Seconds that each rank computes."""


@lru_cache(maxsize=1024)
def played(schedule: Schedule, ranks: int, micro_batches: int, stages: tuple[StageSeconds, ...]) -> Played:
    """Plays the passes of all micro-batches; stages are in the model's order, stage s on rank s modulo `ranks`."""
    waiting = [list(reversed(passes)) for passes in orders(schedule, ranks, micro_batches)]
    clocks, busy, last = [0.0] * ranks, [0.0] * ranks, len(stages) - 1
    forward_done: list[dict[int, float]] = [{} for _ in stages]
    backward_done: list[dict[int, float]] = [{} for _ in stages]
    progress = True
    while progress:
        progress = False
        for rank, passes in enumerate(waiting):
            clock = clocks[rank]
            while passes:
                kind, stage, number = passes[-1]
                of, ready = stages[stage], 0.0
                if kind == "F":
                    if stage:
                        if number not in forward_done[stage - 1]:
                            break
                        ready = forward_done[stage - 1][number] + stages[stage - 1].send
                    seconds, done = of.forward, forward_done[stage]
                elif kind == "W":
                    seconds, done = of.of_weights, None
                else:
                    if stage < last:
                        if number not in backward_done[stage + 1]:
                            break
                        ready = backward_done[stage + 1][number] + of.send
                    seconds = of.backward if kind == "B" else of.of_inputs
                    done = backward_done[stage]
                clock = (ready if ready > clock else clock) + seconds
                busy[rank] += seconds
                if done is not None:
                    done[number] = clock
                passes.pop()
                progress = True
            clocks[rank] = clock
    assert not any(waiting), "no schedule waits for itself"
    return Played(max(clocks), tuple(busy))


SPLIT = 0.5
"""Share of backward that the pass for inputs takes, where backward comes in two: a product has two that are as
large."""


class Sent(NamedTuple):
    """What a pipeline's ranks send each other."""

    boundaries: tuple[int, ...]
    """Bytes of a micro-batch behind each stage but the last."""
    embeddings: int
    """Bytes of the embeddings of all of a pipeline's examples; of a tensor group's each rank has its own."""


def pipeline_time(step: Step, strategy: Strategy, layers_per_stage: Sequence[int], sent: Sent) -> StepTime:
    """Returns the seconds of a strategy with pipelines, itemised.

    Args:
        step: what all strategies with as large micro-batches share.
        strategy: how the model is held.
        layers_per_stage: where it is cut.
        sent: what is sent.
    """
    ranks, micro_batches = strategy.pipeline, strategy.micro_batches
    data_ranks, stages = step.cluster.ranks // strategy.model_ranks, stages_of(layers_per_stage)
    seconds = [_passes(step, strategy, layers, stages[-1].stop) for layers in stages]
    links = [_link(step, ranks, number % ranks) for number in range(len(stages) - 1)]
    timed = tuple(
        StageSeconds(
            forward=of.forward + (of.summed[0] + of.gathered[0]),
            backward=of.backward + of.again + (of.summed[1] + of.gathered[1]),
            of_inputs=of.again + SPLIT * of.backward + (of.summed[1] + of.gathered[1]),
            of_weights=(1 - SPLIT) * of.backward,
            send=links[number](sent.boundaries[number]) if number < len(links) else 0.0,
        )
        for number, of in enumerate(seconds)
    )
    clock = played(strategy.schedule, ranks, micro_batches, timed)
    busiest = max(range(ranks), key=clock.busy.__getitem__)
    of_busiest = seconds[busiest::ranks]
    largest = _largest(step, strategy, stages, data_ranks)
    reduced = 0.0  # gradients are averaged over data ranks
    if data_ranks > 1 and strategy.dense == "dp":
        reduced = all_reduce_seconds(largest, largest.itemsizes.computed * sum(largest.parameters.each))
    elif data_ranks > 1:
        values = largest.parameters.each
        buckets = [sum(values[place] for place in each) for each in unit_buckets(largest, strategy)]
        each = [reduction(largest, strategy, size) for size in buckets]
        reduced = sum(bucket.copy_in + bucket.scatter for bucket in each)
    hop = max(links, key=lambda link: link.beta, default=NOTHING)
    exchanged = 2 * hop(sent.embeddings * (ranks - 1) / ranks) if sent.embeddings else 0.0
    gathered = micro_batches * sum(sum(of.gathered) for of in of_busiest)
    if step.sent is not None:
        gathered += step.sent.inputs(micro_batches * step.sent.input_bytes)
    summed = micro_batches * sum(sum(of.summed) for of in of_busiest)
    items = {
        "forward": micro_batches * sum(of.forward for of in of_busiest),
        "backward": micro_batches * sum(of.backward for of in of_busiest),
        "recomputation": micro_batches * sum(of.again for of in of_busiest),
        "bubble": clock.seconds - clock.busy[busiest],
        "lookup": step.lookup,
        "optimizer": update_seconds(largest, strategy),
        "all_to_all": step.all_to_all,
        "stage_transfer": exchanged,
        "all_gather": publication_seconds(largest, strategy) + gathered,
        "reduce_scatter": reduced if strategy.dense == "zero1" else 0.0,
        "all_reduce": step.tables_reduce + (reduced if strategy.dense == "dp" else 0.0) + summed,
        "host_transfer": 0.0,
    }
    return StepTime(**items, hidden=0.0, total=sum(items.values()))


class _Passes(NamedTuple):
    """Seconds of a micro-batch in one stage."""

    forward: float
    backward: float
    again: float
    """Seconds of recomputation."""
    summed: tuple[float, float] = (0.0, 0.0)
    """Seconds of forward, and of backward with recomputation, in which the stage's tensor groups add up."""
    gathered: tuple[float, float] = (0.0, 0.0)
    """The same in which they gather."""


def _passes(step: Step, strategy: Strategy, layers: range, count: int) -> _Passes:
    recomputed = set(range(count)[RECOMPUTED[strategy.checkpointing]])
    again = [index for index in layers if index in recomputed]

    def of(parts: Parts) -> float:
        return (
            parts.before * (layers.start == 0)
            + sum(parts.layers[layers.start : layers.stop])
            + parts.after * (layers.stop == count)
        )

    def sent(kind: Seconds) -> tuple[float, float]:
        places = range(layers.start + (layers.start > 0), layers.stop + 1 + (layers.stop == count))
        repeated = sum(kind.forward[index + 1] for index in again)  # behind features
        return (
            sum(kind.forward[place] for place in places),
            sum(kind.backward[place] for place in places) + repeated,
        )

    return _Passes(
        of(step.forward) + step.besides * len(layers) / count,
        of(step.backward),
        sum(step.forward.layers[index] for index in again),
        *((sent(step.sent.all_reduce), sent(step.sent.all_gather)) if step.sent is not None else ()),
    )


def _link(step: Step, ranks: int, rank: int) -> AlphaBeta:
    """Returns the link from a rank of pipelines to the next, the slowest of all pipelines."""
    per_host, of_stage = step.cluster.gpus_per_host, step.cluster.ranks // ranks
    here, there = rank * of_stage, (rank + 1) % ranks * of_stage
    crosses = any((here + place) // per_host != (there + place) // per_host for place in range(of_stage))
    return send(step.cluster, across_hosts=crosses)


def _largest(step: Step, strategy: Strategy, stages: Sequence[range], data_ranks: int) -> Step:
    """Returns the step of the rank that has the most parameters, among the data ranks of its stages."""
    count, ranks, numbers = stages[-1].stop, strategy.pipeline, step.parameters
    by_rank = list[Parts]()
    for rank in range(ranks):
        own = stages[rank::ranks]
        layers = [numbers.layers[index] for layers in own for index in layers]
        before = numbers.before if own[0].start == 0 else 0.0
        by_rank.append(Parts(before, layers, numbers.after if own[-1].stop == count else 0.0))
    per_host = min(data_ranks, max(1, step.cluster.gpus_per_host // strategy.tensor))
    group = collectives(step.cluster, -(-data_ranks // per_host), per_host)
    return step._replace(parameters=max(by_rank, key=lambda parts: parts.total), everywhere=group)
