"""Plans in sentences that a person can read."""

from __future__ import annotations

from math import sqrt
from operator import lt
from typing import NamedTuple

from trials.cluster.cluster import byte_words
from trials.optim.one_bit_adam import ChunkLayout, low_rank_of
from trials.planner.estimates import MemoryEstimate, PlanOptions, PricedStrategy, StepTime
from trials.planner.overlap import sent_by_split, split_seconds
from trials.planner.pricing import CostModel
from trials.planner.segments import ITEMSIZES, shapes_of
from trials.planner.step_time import prepare, price
from trials.records.job import DELAY_AFTER, TrainingConfig
from trials.records.strategy import COMPRESSING, DELAYING, Strategy

# What one-bit Adam or PowerSGD is worth on a cluster: the step beside AdamW's with whole gradients, and the
# bandwidth below which it is the shorter one.
#
# Both steps are priced as plans are, for the same strategy. The bandwidth that is varied is that of the slowest
# link, the network between hosts or, on one host, the link inside it. A slower link makes AdamW's step longer by
# 32 times as many bytes, so that there is one bandwidth at most below which one-bit Adam pays.

SLOWEST, FASTEST = 1e5, 1e14
"""Bytes/s between which a bandwidth is looked for."""
CLOSE = 1.01
"""Ratio of two bandwidths that are taken for one."""
FP32_BYTES = 4


class CompressionGain(NamedTuple):
    """A step whose gradients or momentum are compressed beside AdamW's."""

    seconds: float
    """Seconds of the compressed step: of one-bit Adam in its second stage, or with PowerSGD."""
    adamw_seconds: float
    """Seconds of AdamW's step with whole gradients."""
    times_less: float
    """Bytes that leave a rank in a ring all-reduce of fp32, by those of the compressed all-reduce."""
    bandwidth: float
    """Bytes/s of the slowest link."""
    pays_below: float | None
    """Bytes/s of that link below which the compressed step is shorter; None if it never is."""


def worth(pricing: CostModel, strategy: Strategy) -> CompressionGain:
    """Returns what compression is worth for a job on a cluster of several ranks.

    Args:
        pricing: the prices of a job whose optimizer is one-bit Adam, or whose gradients PowerSGD compresses.
        strategy: how the model is held, dp or zero1 (dp alone with PowerSGD).
    """
    micro = pricing.micro_batch(strategy)
    segments, cluster = pricing.segments(micro), pricing.cluster
    layout = ChunkLayout(sum(segment.parameters for segment in segments), cluster.ranks)
    passes = 2 * (cluster.ranks - 1) / cluster.ranks
    ring = passes * FP32_BYTES * layout.numbers
    sent_bytes: float = layout.sent_bytes
    slowest = "network" if cluster.hosts > 1 else "nvlink"
    link = getattr(cluster, slowest)

    def seconds(bandwidth: float) -> tuple[float, float]:
        """Returns those of the compressed step and of AdamW's, if the slowest link has this bandwidth."""
        there = cluster.replace(**{slowest: link.replace(bandwidth=bandwidth)})
        step = prepare(segments, there, pricing.placement, examples=micro, training=pricing.training)
        adamw = step._replace(one_bit=False, low_rank=None)
        return price(step, strategy).total, price(adamw, strategy).total

    if not pricing.one_bit:
        low_rank = low_rank_of(shapes_of(segments), pricing.training.power_sgd_rank)
        assert low_rank is not None
        sent_bytes = passes * ITEMSIZES[pricing.precision] * low_rank.sent
    low, high = SLOWEST, FASTEST
    pays_below = None
    if lt(*seconds(low)):  # bisection of the logarithm
        while high / low > CLOSE:
            middle = sqrt(low * high)
            low, high = (middle, high) if lt(*seconds(middle)) else (low, middle)
        pays_below = low
    return CompressionGain(*seconds(link.bandwidth), ring / sent_bytes, link.bandwidth, pays_below)


PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "embedding_shards": "embedding tables",
    "unsharded_layer": "gathered parameters",
    "communication_buffers": "communication buffers",
    "input_batch": "the input batch",
    "context": "the device's context",
    "reserve": "the allocator's reserve",
}
LARGEST = 2
"""Number of items that a reason names."""


def reason(strategy: Strategy, memory: MemoryEstimate, pricing: CostModel) -> str:
    """Says what a strategy needs, whether that fits, and what takes most."""
    available = pricing.cluster.hbm
    host, host_available = pricing.host_bytes(memory), pricing.host_available(memory)
    needs = f"{strategy.name} needs {byte_words(memory.total)} per rank"
    if memory.margin:
        needs += f" ({byte_words(max(memory.needed, 0))} with the margin)"
    sizes = sorted(((getattr(memory, key), word) for key, word in PARTS.items()), reverse=True)
    most = ", ".join(f"{byte_words(count)} are {word}" for count, word in sizes[:LARGEST] if count)
    if memory.needed > available:
        excess = byte_words(memory.needed - available)
        return f"{needs}, {excess} more than there is: {most} (in the {memory.peak_at})."
    if host > host_available:
        have = f"{byte_words(host)} of a host's memory, which has {byte_words(host_available)}"
        return f"{needs}, which fits, but {have}."
    fits = f"{needs} of {byte_words(available)}: {most} (in the {memory.peak_at})."
    if strategy.tables == "device":
        return fits
    found = pricing.below.hit_rate(strategy.table_cache)
    return f"{fits} About {found:.0%} of the ids looked up find their row in the cache."


def pipeline_words(strategy: Strategy, time: StepTime, pricing: CostModel) -> str:
    """Says where a model is cut into stages, and how long ranks wait for others; nothing without a pipeline."""
    if strategy.pipeline == 1:
        return ""
    layers = ", ".join(map(str, pricing.layers_per_stage(strategy)))
    share = time.bubble / time.total
    return f" Its stages have {layers} layers; the busiest rank waits for {share:.0%} of a step."


def lacking_sentence(closest: PricedStrategy, pricing: CostModel) -> str:
    """Says how far off every strategy is."""
    available, name = byte_words(pricing.cluster.hbm), closest.strategy.name
    lacking = byte_words(closest.lacking_bytes)
    return f"Nothing fits {available} per rank: {name} comes closest and lacks {lacking}."


def faster_sentence(chosen: PricedStrategy | None, fastest: PricedStrategy | None) -> str | None:
    """Says that more techniques would be faster; None if they would not."""
    if chosen is None or fastest is None or fastest.time.total >= chosen.time.total:
        return None
    times = chosen.time.total / fastest.time.total
    name = fastest.strategy.name
    return f"{name} has more techniques and a step {times:.2f} times as fast; prefer=fastest takes it."


def option_sentences(options: PlanOptions) -> tuple[str, ...]:
    """Says what was asked of a plan beside the model and the cluster, and what attempts have taught."""
    sentences = []
    if options.technique is not None:
        more = " An attempt ran out of memory: it may recompute more, and have more micro-batches."
        sentences.append(
            f"The ladder is restricted to technique={options.technique.name}.{more if options.climbing else ''}"
        )
    if options.memory_margin:
        change = "added to" if options.memory_margin > 0 else "taken off"
        size = byte_words(abs(options.memory_margin))
        sentences.append(f"{size} are {change} every predicted peak (memory_margin).")
    sentences += [
        f"{byte_words(missing)} are added under {held_as}: attempts so far needed as much more than planned."
        for held_as, missing in sorted(options.learnt.items())
    ]
    return tuple(sentences)


def delay_sentences(training: TrainingConfig) -> tuple[str, ...]:
    """Says that a training's updates are delayed, which restricts the ladder."""
    if not training.delayed_update:
        return ()
    return (
        f"The ladder is restricted to {DELAYING}, which alone can delay updates (training.delayed_update): from "
        f"step {DELAY_AFTER + 1} on the host's update goes on while the next step runs.",
    )


def compression_sentences(pricing: CostModel, chosen: PricedStrategy | None) -> tuple[str, ...]:
    """Says of a job whose optimizer is one-bit Adam, or whose gradients PowerSGD compresses, to what the ladder is
    restricted, what is sent, and on which links that makes a step shorter."""
    rank = pricing.training.power_sgd_rank
    if pricing.one_bit:
        restricted = (
            f"The ladder is restricted to {' and '.join(COMPRESSING)}, under which one-bit Adam can compress "
            "(training.optimizer=onebit_adam); times and memory are of its second stage if that holds more."
        )
        alone = "and compresses as if there were others: AdamW takes less time"
        begins, sends = "After its first stage one-bit Adam sends ", " of gradients in fp32"
        whole = "of AdamW and of the first stage"
    elif rank:
        setting = f"training.power_sgd_rank={rank}"
        restricted = f"The ladder is restricted to dp, whose gradients PowerSGD can compress ({setting})."
        alone = "and its gradients stay as they are"
        begins, sends = "Once PowerSGD has begun, ", " of gradients in fp32 is sent"
        whole = "with whole gradients"
    else:
        return ()
    cluster = pricing.cluster
    if cluster.ranks == 1:
        return (f"{restricted} One rank sends nothing, {alone}.",)
    if chosen is None:
        return (restricted,)
    found = worth(pricing, chosen.strategy)
    sent = (
        f"{begins}1/{found.times_less:.1f}{sends}: by the roofline a step takes {1e3 * found.seconds:.3g} ms, one "
        f"{whole} {1e3 * found.adamw_seconds:.3g} ms."
    )
    link = "network" if cluster.hosts > 1 else "link inside the host"
    if found.pays_below is None:
        pays = f"It pays at no bandwidth of the {link}: compression takes longer than what it saves."
    else:
        pays = (
            f"It pays if the {link} has less than {found.pays_below * 8 / 1e9:.3g} Gb/s for each rank (this "
            f"one has {found.bandwidth * 8 / 1e9:.3g})."
        )
    return restricted, f"{sent} {pays}"


def split_sentences(
    chosen: PricedStrategy | None, closest: PricedStrategy | None, pricing: CostModel
) -> tuple[str, ...]:
    """Says of a strategy that splits modules why it is taken, what all ranks of a tensor group have whole, and
    what it costs if a group has ranks of several hosts. It speaks of the chosen strategy, or if nothing
    fits of what the ladder is restricted to; `closest` is the closest of what is less cut."""
    strategy = chosen.strategy if chosen is not None else pricing.options.technique
    if strategy is None or strategy.tensor == 1:
        return ()
    degree, cluster, sentences = strategy.tensor, pricing.cluster, []
    both = strategy.pipeline > 1
    if closest is not None and pricing.options.prefer == "least":
        lacking = byte_words(closest.lacking_bytes)
        stages = f", in the stages of a pipeline of {strategy.pipeline}," if both else ""
        rest = "does only one of the two, or neither," if both else "leaves them whole"
        sentences.append(
            f"Modules are split over {degree} ranks (tensor{degree}){stages} because nothing that {rest} fits "
            f"with so few techniques: {closest.strategy.name} comes closest and lacks {lacking}."
        )
    segments = pricing.segments(pricing.micro_batch(strategy), degree)
    whole = list(dict.fromkeys(words for segment in segments for words in segment.whole))
    if whole:
        sentences.append(f"Under tensor{degree} each rank has all, or a map, of: {'; '.join(whole)}.")
    if not pricing.splits(degree):
        sentences.append(f"No module of this model can be split over {degree} ranks: they repeat all work.")
    if degree > cluster.gpus_per_host:
        examples = pricing.micro_batch(strategy)
        inside = cluster.replace(hosts=1, gpus_per_host=degree)
        seconds, alone = (
            sum(split_seconds(sent_by_split(segments, where, degree, examples), strategy)) / strategy.pipeline
            for where in (cluster, inside)
        )
        sentences.append(
            f"Warning: tensor{degree} splits modules over ranks of {degree // cluster.gpus_per_host} hosts. What "
            f"they send each other takes {1e3 * seconds:.3g} ms of a step over the network, {1e3 * alone:.3g} ms "
            f"if one host had them; at most {cluster.gpus_per_host} ranks are in one."
        )
    return tuple(sentences)
