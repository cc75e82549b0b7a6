"""A ladder whose strategies are priced when they are looked at, and the choice among them.

The choice is that of `trials.planner.ladder.choose` over the whole priced ladder. It prices less: strategies
come in the order in which they are preferred, one whose least bytes (`bounds`) exceed the memory is passed
over, and so is one whose least seconds exceed those of what fits already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby, takewhile
from typing import Any, get_args

from pydantic import ValidationError

from dhen.errors import UserError
from dhen.tape import FP32_BYTES
from trials.cluster.cluster import byte_words
from trials.optim.adamw import MOMENTS
from trials.planner.estimates import MemoryEstimate, PlanOptions, PricedStrategy, StepTime
from trials.planner.overlap import BACKWARD_PASSES, from_sizes
from trials.planner.pricing import CostModel
from trials.planner.segments import Segment
from trials.planner.sentences import pipeline_words, reason
from trials.planner.step_time import PlannedStep, segment_seconds
from trials.records.job import Synchrony, TablesConfig
from trials.records.strategy import RECOMPUTED, Prefer, ServerLevel, Strategy

# What a strategy takes at least, in seconds and in bytes, from what is known without a model's parts.
#
# To price a strategy that splits modules the model has to be written down as one of its tensor ranks has it, for
# each degree anew; to price one with a pipeline its passes are played. Bounds need neither: they are of what the
# whole model takes on one rank, of which a tensor rank has at least its equal part, and of equal shares of a
# pipeline's ranks. What they leave out is never below 0: what ranks send each other, the update, activations,
# what stays whole.

ROUNDING = 1e-9
"""Share by which sums of the same seconds in another order may differ."""
IN_ORDER = ("1f1b", "gpipe")
"""Schedules whose stages go backward in one pass each, so that the first to go back is one of the last stage."""


def compute_bounds(
    step: PlannedStep, segments: Sequence[Segment], tensor: int
) -> tuple[list[float], list[float]]:
    """Returns the least seconds of forward and backward of each segment in one micro-batch.

    Args:
        step: of a micro-batch on ranks that split nothing.
        segments: the model's.
        tensor: over how many ranks modules are split; a rank has all of features, and of any other at least its
            part of what depends on sizes.
    """
    on_cpu, passes = step.cluster.device == "cpu", segment_seconds(step)
    starts = [from_sizes(0.0, segment, step.cluster) for segment in segments]

    def at_least(whole: float, start: float) -> float:
        return start + (whole - start) / tensor if on_cpu else max(start, whole / tensor)

    forward = [at_least(whole, start) for (whole, _), start in zip(passes, starts, strict=True)]
    backward = [
        at_least(whole, BACKWARD_PASSES * start) for (_, whole), start in zip(passes, starts, strict=True)
    ]
    return [passes[0][0], *forward[1:]], [passes[0][1], *backward[1:]]


# The strategies with servers on the ladder: how many servers, and on which level they have the tables.
#
# Memory comes before the SSD: if all hosts together have room, servers have rows in memory, as few as have
# room and a step of plain dp is at most `WORTH` longer than with one server per host. Both levels are on the
# ladder; a choice takes memory if it fits, as its steps are shorter. On an SSD, whose size no cluster says,
# what is known of each row decides in the same way. No more than one server per host is taken unless asked for.

WORTH = 0.05
"""Share by which a step may be longer with fewer servers."""
LEVELS: tuple[ServerLevel, ...] = get_args(ServerLevel)


def with_servers(
    strategies: tuple[Strategy, ...], options: PlanOptions, pricing: CostModel
) -> tuple[Strategy, ...]:
    """Returns the strategies that can train against servers, with as many as were asked for or are needed.

    Raises:
        UserError: for more servers than a growing table has rows, or two numbers of them.
    """
    asked = options.technique
    count = options.servers or (asked.servers if asked is not None else 0)
    if options.servers and asked is not None and asked.servers not in (0, options.servers):
        raise UserError(
            f"servers={options.servers} and technique={asked.name} name different numbers of servers; "
            "leave one out."
        )
    of_ranks = [each for each in strategies if not each.model_parallel and each.tables == "device"]
    if pricing.alone:
        of_ranks = [each for each in of_ranks if each.dense == "dp" and each.checkpointing == "none"]
    counts = {level: count or _needed(pricing, level) for level in LEVELS}
    servers = max(counts.values())
    for table in pricing.served.tables:
        if table.growing is not None and table.rows - 1 < servers:
            raise UserError(
                f"table {table.name!r} has room for {table.rows - 1} id(s), fewer than one for each of {servers} "
                f"servers; give servers={table.rows - 1} at most, or the table more capacity."
            )
    return tuple(
        each.replace(servers=counts[level], server_level=level) for each in of_ranks for level in LEVELS
    )


def check_technique(asked: Strategy | None, pricing: CostModel) -> None:
    """Checks that a technique that is asked for can train with tables where they are."""
    synchrony = pricing.training.tables.synchrony
    if asked is None:
        return
    if not pricing.on_servers:
        if asked.servers:
            raise UserError(
                f"technique={asked.name} has servers, and training.tables.synchrony={synchrony} has "
                f"{'tables on the ranks' if pricing.schema.tables else 'no tables to put there'}: give "
                "training.tables.synchrony=async, semi or sync too, or leave servers out."
            )
        return
    if asked.model_parallel or asked.tables != "device":
        raise UserError(
            f"technique={asked.name}: training.tables.synchrony={synchrony} has servers for ranks that hold the "
            "whole dense part each, or a shard of it; leave one of the two out."
        )
    if pricing.alone and (asked.dense != "dp" or asked.checkpointing != "none"):
        raise UserError(
            f"technique={asked.name}: training.tables.synchrony=async has the dense part on servers too, and "
            "ranks hold it as dp does; give technique=dp, or synchrony=semi or sync."
        )


def fewest_servers(pricing: CostModel, level: ServerLevel, rank_bytes: int) -> int | None:
    """Returns the fewest servers with which a host has room beside its ranks; None if there are none."""
    room = pricing.room_for_servers - rank_bytes
    return pricing.kept.fewest(level, pricing.cluster.hosts, room)


def _needed(pricing: CostModel, level: ServerLevel) -> int:
    """Returns how many servers are taken on a level; as many as hosts if these have no room."""
    dp, hosts = Strategy(servers=1, server_level=level), pricing.cluster.hosts
    memory = pricing.memory(dp)
    fewest = fewest_servers(pricing, level, pricing.host_bytes(memory) - memory.servers)
    if fewest is None:
        return hosts
    doubled = takewhile(lambda count: count < hosts, (fewest << power for power in range(hosts.bit_length())))
    counts = [*doubled, hosts]
    seconds = {count: pricing.time(dp.replace(servers=count)).total for count in counts}
    longest = (1 + WORTH) * min(seconds.values())
    return next(count for count, each in seconds.items() if each <= longest)


def too_few(pricing: CostModel, strategy: Strategy, rank_bytes: int) -> str:
    """Says of servers that have no room what there is, and what would do."""
    level, kept, hosts = strategy.server_level, pricing.kept, pricing.cluster.hosts
    takes = byte_words(kept.of_host(strategy.servers, level, hosts))
    count = f"{strategy.servers} servers take" if strategy.servers > 1 else "1 server takes"
    have = f"{count} {takes} of a host's memory, of which ranks and system leave "
    have += byte_words(max(0, pricing.room_for_servers - rank_bytes))
    fewest = fewest_servers(pricing, level, rank_bytes)
    on_ssd = fewest_servers(pricing, "ssd", rank_bytes) if level == "memory" else None
    would = [
        *([f"servers={fewest}"] if fewest is not None else []),
        *([f"+servers{on_ssd}=ssd"] if on_ssd is not None else []),
    ]
    return f"{have}; {' or '.join(would) if would else 'more hosts, or more memory in each,'} would do."


# Servers in sentences: why there are so many, what is pulled and pushed, and which synchrony is faster.

MODES: tuple[Synchrony, ...] = ("sync", "semi", "async")


def servers_words(strategy: Strategy, pricing: CostModel) -> str:
    """Says what servers have, what a rank pulls and pushes, and what is hidden; nothing without servers."""
    if not strategy.servers:
        return ""
    served, found = pricing.served, pricing.servers_time(strategy)
    rest = pricing.time(strategy).total - found.total + found.hidden
    hosts, memory = pricing.cluster.hosts, byte_words(pricing.kept.rows + pricing.kept.beside)
    several = "s" if hosts > 1 else ""
    where = f"in the memory of {hosts} host{several}"
    if strategy.server_level == "ssd" and fewest_servers(pricing, "memory", 0) is None:
        where = f"do not fit in the memory of {hosts} host{several}"
    elif strategy.server_level == "ssd":
        where = "on SSDs"
    count = f"{strategy.servers} server{'s' if strategy.servers > 1 else ''}"
    on_ssd = " with SSD" if strategy.server_level == "ssd" else ""
    pulled, pushed = byte_words(int(served.pulled_bytes)), byte_words(int(served.pushed_bytes))
    sent = f"a rank pulls {pulled} and pushes {pushed} a step"
    hidden = "nothing of which is hidden"
    if found.hidden:
        hidden = f"{_ms(found.hidden)} of which are hidden behind {_ms(rest)}"
    return (
        f" Tables of {memory} {where}; {count}{on_ssd}; {sent}: {_ms(found.pull)} pull, {_ms(found.push)} push, "
        f"{hidden}."
    )


def mode_sentences(strategy: Strategy | None, pricing: CostModel) -> tuple[str, ...]:
    """Says how long a batch takes under each synchrony on these servers; nothing if ranks have tables."""
    if strategy is None or not strategy.servers:
        return ()
    seconds = {}
    for mode in MODES:
        if mode == "async" and strategy.dense != "dp":
            continue
        with suppress(ValidationError):  # another setting of the training excludes this synchrony
            seconds[mode] = seconds_per_batch(pricing, strategy, mode)
    best = min(seconds, key=lambda mode: seconds[mode])
    said = ", ".join(f"{mode} {_ms(each)}" for mode, each in seconds.items())
    return (
        f"Prediction for {strategy.name}, seconds of training for a batch by training.tables.synchrony: {said}; "
        f"{best} is the fastest. Synchrony changes what is learnt.",
    )


def seconds_per_batch(pricing: CostModel, strategy: Strategy, mode: Synchrony) -> float:
    """Returns the predicted seconds of training for a batch under a synchrony, semi with its default staleness
    unless that is what the training has."""
    if mode == pricing.training.tables.synchrony:
        other = pricing
    else:
        other = pricing.changed(tables=TablesConfig(synchrony=mode))
    strategy = strategy if mode != "async" else strategy.replace(checkpointing="none")
    return other.time(strategy).total / (other.cluster.ranks if other.alone else 1)


def way_out(pricing: CostModel) -> str:
    """Says, if tables fit on no rank, with how many servers they would; nothing if they would not."""
    if pricing.training.weight_average:  # which servers exclude
        return ""
    other = pricing.changed(tables=TablesConfig(synchrony="semi"))
    count = fewest_servers(other, "memory", 0)
    if count is not None:
        return (
            f" Or servers hold the tables (training.tables.synchrony=semi): {count} would have room for "
            "them in the memory of hosts."
        )
    if fewest_servers(other, "ssd", 0) is None:
        return ""
    hosts = pricing.cluster.hosts
    return (
        f" Or servers hold the tables on SSDs (training.tables.synchrony=semi servers={hosts}, one per host)."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


class PricedLadder(Sequence[PricedStrategy]):
    """Strategies, fewer techniques first."""

    def __init__(self, pricing: CostModel, strategies: Sequence[Strategy]) -> None:
        self._pricing, self.strategies = pricing, tuple(strategies)
        self._priced: dict[int, PricedStrategy] = {}
        self._memory: dict[int, MemoryEstimate] = {}
        self._time: dict[int, StepTime] = {}
        self._compute: dict[tuple[int, int], tuple[list[float], list[float]]] = {}

    def __len__(self) -> int:
        return len(self.strategies)

    def __getitem__(self, place: Any) -> Any:
        place = range(len(self))[place]
        if isinstance(place, range):  # of a slice
            return [self[one] for one in place]
        if place not in self._priced:
            strategy, pricing = self.strategies[place], self._pricing
            memory, time, lacking = self.memory(place), self.time(place), self._lacks(place)
            below = strategy.tables != "device"
            self._priced[place] = PricedStrategy(
                strategy=strategy,
                memory=memory,
                time=time,
                fits=lacking == 0,
                lacking_bytes=lacking,
                reason=reason(strategy, memory, pricing)
                + pipeline_words(strategy, time, pricing)
                + servers_words(strategy, pricing),
                batches_at_once=pricing.cluster.ranks if pricing.alone else 1,
                table_hit_rate=pricing.below.hit_rate(strategy.table_cache) if below else None,
            )
        return self._priced[place]

    @property
    def looked_at(self) -> int:
        """Number of strategies that were priced so far, in memory or time."""
        return len(self._memory.keys() | self._time.keys())

    def chosen(self, prefer: Prefer) -> PricedStrategy | None:
        """Returns the least strategy that fits, or the fastest; None if none fits."""
        places = range(len(self))
        if prefer == "fastest":
            return self._fastest_of(places)

        def preferred(place: int) -> tuple[int, int]:
            strategy = self.strategies[place]
            return len(strategy.techniques), strategy.ways_to_cut

        for _, alike in groupby(sorted(places, key=preferred), key=preferred):
            if (found := self._fastest_of(list(alike))) is not None:
                return found
        return None

    def faster_than(self, chosen: PricedStrategy) -> PricedStrategy | None:
        """Returns the fastest strategy that fits, if it is faster than this one."""
        return self._fastest_of(range(len(self)), chosen.time.total)

    def closest(self, among: Callable[[Strategy], bool] = lambda _: True) -> PricedStrategy | None:
        """Returns the strategy that lacks least, of several the first; None if there are none."""
        best: tuple[int, int] | None = None
        places = (place for place, strategy in enumerate(self.strategies) if among(strategy))
        for least, place in sorted((self._least_lacking(place), place) for place in places):
            if best is not None and (least, place) > best:
                break
            found = self._lacks(place), place
            best = found if best is None else min(best, found)
        return None if best is None else self[best[1]]

    def _fastest_of(self, places: Sequence[int], seconds: float | None = None) -> PricedStrategy | None:
        """Returns the fastest of these strategies that fits, and takes less than so many seconds; of several the
        first."""
        best: tuple[float, int] | None = None if seconds is None else (seconds, -1)
        for least, place in sorted((self._least_seconds(place), place) for place in places):
            if best is not None and (least, place) > best:
                break
            if self._least_lacking(place):
                continue
            found = self.time(place).total, place
            if (best is None or found < best) and not self._lacks(place):
                best = found
        return None if best is None or best[1] < 0 else self[best[1]]

    def memory(self, place: int) -> MemoryEstimate:
        """Returns the memory of a strategy."""
        if place not in self._memory:
            self._memory[place] = self._pricing.memory(self.strategies[place])
        return self._memory[place]

    def time(self, place: int) -> StepTime:
        """Returns the time of a strategy's step."""
        if place not in self._time:
            self._time[place] = self._pricing.time(self.strategies[place])
        return self._time[place]

    def _lacks(self, place: int) -> int:
        return self._pricing.lacking_bytes(self.memory(place))

    def _least_seconds(self, place: int) -> float:
        strategy, pricing = self.strategies[place], self._pricing
        micro, below = pricing.micro_batch(strategy), strategy.tables != "device"
        step = pricing.step(micro, below=below)
        key = micro, strategy.tensor
        if key not in self._compute:
            self._compute[key] = compute_bounds(step, pricing.segments(micro), strategy.tensor)
        each_forward, each_backward = self._compute[key]
        again = sum(each_forward[1:-1][RECOMPUTED[strategy.checkpointing]])
        forward, backward = sum(each_forward) + step.besides, sum(each_backward) + again
        once, stages = forward + backward, strategy.pipeline
        least = strategy.micro_batches * once / stages
        if stages > 1 and strategy.schedule in IN_ORDER:
            # the first micro-batch comes back to a stage, which then has the others' backward before it
            least = max(least, once + (strategy.micro_batches - 1) * backward / stages)
        return (1 - ROUNDING) * (least + (step.all_to_all + step.tables_reduce))

    def _least_lacking(self, place: int) -> int:
        """Returns bytes of the device's memory that a strategy lacks at least; 0 for those whose memory is priced
        without writing down a part of the model."""
        strategy, pricing = self.strategies[place], self._pricing
        if place in self._memory:
            return self._lacks(place)
        if strategy.tensor == 1:
            return 0
        # weights, gradients and optimizer state of the model's equal parts
        computed, _, moment = pricing.itemsizes
        own = pricing.numbers // strategy.model_ranks
        state = (FP32_BYTES if computed != FP32_BYTES else 0) + len(MOMENTS) * moment
        if strategy.dense == "zero1":
            state = 2 * computed * own + state * (own // pricing.data_ranks(strategy))
        else:
            state = (2 * computed + state) * own
        return max(0, pricing.least_bytes(strategy, state) - pricing.cluster.hbm)
