"""Pipelines on paper: where a model is cut, who computes what when, the fullest rank's memory, a step's seconds.

A rank holds its stages' weights, gradients and optimizer state as dp or zero1 do, gradients from the first
micro-batch on. Of each micro-batch that has gone forward through a stage and not yet back it holds what the
stage keeps for backward, and what it has sent on; how many these are follows from the passes in their order.
What stages receive has a place for every micro-batch, for activations as for gradients, which
`torch.distributed.pipelining` makes before the first step. The first stage has the embeddings of all of the
pipeline's examples, and their gradients, beside those that its rank looked up.

The duration is that of the passes, played on a clock for each rank. Sends between stages are priced by the link
that they cross, and are what passes wait for; the time in which the busiest rank waits is the bubble. Gradients
are averaged over data ranks when the last pass has ended, and hide behind nothing. Embeddings that a pipeline's
ranks have looked up reach its first stage before the first pass, and their gradients go back after the last. What
tensor groups in a stage send each other takes its ranks as long as compute does, pass by pass.

Left out: that ranks of a CPU that wait leave it to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from dhen.tape import FP32_BYTES
from trials.optim.adamw import MOMENTS
from trials.planner.collectives import NOTHING, AlphaBeta, collectives, send
from trials.planner.estimates import StepTime
from trials.planner.memory import DensePeak, recomputed, update_workspace
from trials.planner.overlap import Seconds
from trials.planner.segments import Segment
from trials.planner.step_time import (
    PartSeconds,
    PlannedStep,
    all_reduce_seconds,
    publication_seconds,
    reduction,
    unit_buckets,
    update_seconds,
)
from trials.planner.zero_memory import (
    TABLES_UPDATE,
    Activations,
    Itemsizes,
    LiveMemory,
    RankInput,
    total,
    zero_state,
    zero_wrapping_bytes,
)
from trials.records.strategy import CHUNKS_PER_RANK, RECOMPUTED, Schedule, Strategy

# Where a model is cut into the stages of a pipeline: so that the slowest stage is as fast as it can be.


def stages_of(layers_per_stage: Sequence[int]) -> list[range]:
    """Returns the layers of each stage, from their numbers."""
    return [range(start, stop) for start, stop in pairwise(accumulate(layers_per_stage, initial=0))]


@lru_cache(maxsize=4096)
def layers_per_stage(seconds: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage, one at least, of which the slowest takes the fewest seconds.

    Args:
        seconds: seconds of each segment: features, which are the first stage's, the layers, and the head, which
            is the last stage's.
        stages: number of stages, at most that of the layers.
    """
    layers = len(seconds) - 2
    assert 1 <= stages <= layers
    before = [0.0, *accumulate(seconds[1:-1])]

    def taken(start: int, stop: int) -> float:
        ends = seconds[0] * (start == 0) + seconds[-1] * (stop == layers)
        return before[stop] - before[start] + ends

    # for the first layers, by their number: seconds of the slowest stage, and the layers of each
    slowest: dict[int, tuple[float, tuple[int, ...]]] = {
        stop: (taken(0, stop), (stop,)) for stop in range(1, layers - stages + 2)
    }
    for stage in range(1, stages):
        slowest = {
            stop: min(
                (max(slowest[start][0], taken(start, stop)), (*slowest[start][1], stop - start))
                for start in range(stage, stop)
                if start in slowest
            )
            for stop in range(stage + 1, layers - stages + stage + 2)
        }
    return slowest[layers][1]


# Who computes what when in a pipeline: each rank's passes, one after another, under each schedule.
#
# - `gpipe` (arXiv 1811.06965): all micro-batches forward, then all backward.
# - `1f1b` (PipeDream-Flush, arXiv 2006.09503): as soon as it can, a stage goes backward, so that it holds no
# more
#   micro-batches than there are stages behind it.
# - `interleaved` (arXiv 2104.04473): each rank has two stages that are apart in the model, so that the pipeline
#   fills with half as much at a time.
# - `zero_bubble` (ZB1P of arXiv 2401.10241): backward comes in two passes, of which the one for weights waits
# until
#   there is nothing else to do.
#
# These are the orders of `torch.distributed.pipelining`, whose schedules run; a test holds them to what those
# do. They are here too because importing torch's takes most of a second, and a plan milliseconds.

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


Held = tuple[Kind, int, tuple[int, ...]]
"""A pass, its stage by its place among the rank's, and of each of the rank's stages how many micro-batches have
gone forward through it, and not all the way back, when the pass begins."""


@lru_cache(maxsize=4096)
def most_held(schedule: Schedule, ranks: int, micro_batches: int, rank: int) -> tuple[Held, ...]:
    """Returns the moments of a rank's step in which most is held: of each kind of pass through each stage, those
    that no other surpasses."""
    held, found = [0] * CHUNKS_PER_RANK[schedule], set[Held]()
    for kind, stage, _ in orders(schedule, ranks, micro_batches)[rank]:
        chunk = stage // ranks
        found.add((kind, chunk, tuple(held)))
        held[chunk] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
    return tuple(
        one
        for one in found
        if not any(
            other[:2] == one[:2] and other != one and all(map(int.__ge__, other[2], one[2]))
            for other in found
        )
    )


def wrong_micro_batches(schedule: Schedule, ranks: int, micro_batches: int) -> str | None:
    """Says why a schedule cannot run with so many micro-batches; None if it can."""
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
    """Returns a rank's passes if micro-batches go in rounds through each of its stages in turn."""
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


class StageMemory(NamedTuple):
    """One stage of a model, in bytes of one micro-batch."""

    segments: tuple[Segment, ...]
    received: int
    """Activations from the stage before it; 0 for the first."""
    sent: int
    """Activations to the next stage; 0 for the last."""
    kept: int
    """What is held of a micro-batch from its forward pass to its backward pass."""
    forward: int
    """The most that a forward pass holds."""
    backward: int
    """The most that a backward pass holds."""
    parameters: int
    """Number of parameters (values, not bytes)."""


def pipeline_peak(
    stages: Sequence[StageMemory],
    strategy: Strategy,
    batch: RankInput,
    looked_up: int,
    gathered: int = 0,
    *,
    itemsizes: Itemsizes,
    data_ranks: int,
    device: Literal["cpu", "cuda"],
    bucket_bytes: int,
) -> DensePeak:
    """Returns the dense part of the fullest rank, at the peak of a step after the first.

    Args:
        stages: all stages of the model, at the micro-batch's size.
        strategy: how it is held.
        batch: what a rank reads; its embeddings are those of all of the pipeline's examples.
        looked_up: bytes of the embeddings that each rank looks up.
        gathered: bytes of those that each rank of the first stage has of its pipeline, beside those of its tensor
            group; 0 if the first are the second.
        itemsizes: bytes per number: c, r and those of a moment.
        data_ranks: number of ranks that have the same stages.
        device: kind of the device, for the update's workspace and gloo's copies.
        bucket_bytes: bytes of gradients that zero1 reduces at a time.
    """
    found = list[DensePeak]()
    computed, reduced, moment_bytes = itemsizes
    for rank in range(strategy.pipeline):
        own = stages[rank :: strategy.pipeline]
        segments = [segment for stage in own for segment in stage.segments]
        values = sum(stage.parameters for stage in own)
        buffers = sum(segment.buffer_bytes for segment in segments)
        wrapping = gradients = 0
        if strategy.dense == "zero1":
            zero = zero_state(segments, strategy, itemsizes, data_ranks, bucket_bytes)
            parameters, owned, buckets = zero.weights + zero.masters, zero.owned, zero.weights
            longest = max(zero.parts, default=0)
            sent = reduced * longest * data_ranks
            on_its_way = reduced * longest + sent * ((reduced != computed) + (device == "cpu"))
            flat = FP32_BYTES * owned
            wrapping = buffers + zero_wrapping_bytes(segments, itemsizes, zero)
        else:
            parameters = (FP32_BYTES + (computed if computed != FP32_BYTES else 0)) * values
            owned, buckets, gradients = values, 0, computed * values
            # gradients one after another, beside those of the model, and what is sent of them
            flat = FP32_BYTES * values
            on_its_way = reduced * values if data_ranks > 1 and reduced != FP32_BYTES else 0
        embeddings = batch.embeddings if rank == 0 else 0
        workspace = update_workspace(itemsizes, owned, device)
        moments = [
            *_held_in_passes(
                rank, stages, strategy, gradients, embeddings
            ),  # beside the embeddings' gradients
            LiveMemory("optimizer step", 0, 0, gradients + flat, buffers=max(on_its_way, workspace)),
        ]
        peak = max(moments, key=total)
        of_stage = peak.at.partition(" of ")[2] or "stage"
        places = strategy.micro_batches * sum(stage.received + stage.sent for stage in own)
        found.append(
            DensePeak(
                parameters=buffers + parameters,
                optimizer_state=len(MOMENTS) * moment_bytes * owned,
                buckets=buckets + places,
                batch=looked_up + (0 if rank else gathered) + embeddings + batch.other,
                moment=peak,
                left=LiveMemory(TABLES_UPDATE, 0, 0, gradients),
                wrapping=wrapping,
                by_segment=((of_stage, peak.activations),) if peak.activations else (),
                host=0,
            )
        )
    return max(found, key=lambda peak: peak.total)


def stage_memories(
    segments: Sequence[Segment], layers_per_stage: Sequence[int], strategy: Strategy
) -> list[StageMemory]:
    """Returns all stages of a model, in their order."""
    again, every, found = recomputed(segments, strategy), stages_of(layers_per_stage), list[StageMemory]()
    for number, layers in enumerate(every):
        first, last = number == 0, number == len(every) - 1
        places = slice(layers.start + (not first), layers.stop + 1 + last)
        own = tuple(segments[places])
        activations, sent = Activations(own, again[places]), 0 if last else own[-1].footprint.output
        found.append(
            StageMemory(
                own,
                received=0 if first else found[-1].sent,
                sent=sent,
                kept=sum(activations.kept) + sent,
                forward=max(activations.forward) + sent,
                backward=max(activations.backward),
                parameters=sum(segment.parameters for segment in own),
            )
        )
    return found


def _held_in_passes(
    rank: int, stages: Sequence[StageMemory], strategy: Strategy, gradients: int, beside: int
) -> Iterator[LiveMemory]:
    """Yields the passes in which most is held; gradients are there from the first backward on, and counted
    throughout."""
    own = stages[rank :: strategy.pipeline]
    kept = [stage.kept for stage in own]
    for kind, chunk, held in most_held(strategy.schedule, strategy.pipeline, strategy.micro_batches, rank):
        stage = own[chunk]
        before = sum(count * size for count, size in zip(held, kept, strict=True)) + beside
        if kind == "F":
            most, way = before + stage.forward, "forward"
        else:
            most, way = before + max(0, stage.backward - stage.kept), "backward"
        yield LiveMemory(f"{way} of stage {rank + chunk * strategy.pipeline}", 0, most, gradients)


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
    """Seconds of the pass for inputs, if backward comes in two."""
    of_weights: float
    send: float
    """Seconds in which the stage's output reaches the next stage, and its gradient comes back."""


class PipelineTimeline(NamedTuple):
    """A step's passes on the clock."""

    seconds: float
    """Seconds from the first pass until the last one has ended."""
    busy: tuple[float, ...]
    """Seconds that each rank computes."""


@lru_cache(maxsize=1024)
def played(
    schedule: Schedule, ranks: int, micro_batches: int, stages: tuple[StageSeconds, ...]
) -> PipelineTimeline:
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
    return PipelineTimeline(max(clocks), tuple(busy))


SPLIT = 0.5
"""Share of backward that the pass for inputs takes, if backward comes in two: a product has two that are as
large."""


class PipelineTraffic(NamedTuple):
    """What a pipeline's ranks send each other."""

    boundaries: tuple[int, ...]
    """Bytes of a micro-batch behind each stage but the last."""
    embeddings: int
    """Bytes of the embeddings of all of a pipeline's examples; of a tensor group's each rank has its own."""


def pipeline_time(
    step: PlannedStep, strategy: Strategy, layers_per_stage: Sequence[int], sent: PipelineTraffic
) -> StepTime:
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


def _passes(step: PlannedStep, strategy: Strategy, layers: range, count: int) -> _Passes:
    recomputed = set(range(count)[RECOMPUTED[strategy.checkpointing]])
    again = [index for index in layers if index in recomputed]

    def of(parts: PartSeconds) -> float:
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


def _link(step: PlannedStep, ranks: int, rank: int) -> AlphaBeta:
    """Returns the link from a rank of pipelines to the next, the slowest of all pipelines."""
    per_host, of_stage = step.cluster.gpus_per_host, step.cluster.ranks // ranks
    here, there = rank * of_stage, (rank + 1) % ranks * of_stage
    crosses = any((here + place) // per_host != (there + place) // per_host for place in range(of_stage))
    return send(step.cluster, across_hosts=crosses)


def _largest(step: PlannedStep, strategy: Strategy, stages: Sequence[range], data_ranks: int) -> PlannedStep:
    """Returns the step of the rank that has the most parameters, among the data ranks of its stages."""
    count, ranks, numbers = stages[-1].stop, strategy.pipeline, step.parameters
    by_rank = list[PartSeconds]()
    for rank in range(ranks):
        own = stages[rank::ranks]
        layers = [numbers.layers[index] for layers in own for index in layers]
        before = numbers.before if own[0].start == 0 else 0.0
        by_rank.append(PartSeconds(before, layers, numbers.after if own[-1].stop == count else 0.0))
    per_host = min(data_ranks, max(1, step.cluster.gpus_per_host // strategy.tensor))
    group = collectives(step.cluster, -(-data_ranks // per_host), per_host)
    return step._replace(parameters=max(by_rank, key=lambda parts: parts.total), everywhere=group)
