"""A ladder whose strategies are priced when they are looked at, and the choice among them.

The choice is that of `trials.planner.ladder.choose` over the whole priced ladder. It prices less: strategies come
in the order in which they are preferred, one whose least bytes (`bounds`) exceed the memory is passed over, and so
is one whose least seconds exceed those of what fits already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import overload

from trials.planner.choice.bounds import ComputeBounds, least_seconds, least_state_bytes
from trials.planner.choice.servers_words import servers_words
from trials.planner.estimates import MemoryEstimate, PricedStrategy, StepTime
from trials.planner.pricing import Pricing
from trials.planner.sentences import pipeline_words, reason
from trials.strategy import Prefer, Strategy


class PricedLadder(Sequence[PricedStrategy]):
    """Strategies, fewer techniques first."""

    def __init__(self, pricing: Pricing, strategies: Sequence[Strategy]) -> None:
        self._pricing, self.strategies = pricing, tuple(strategies)
        self._priced: dict[int, PricedStrategy] = {}
        self._memory: dict[int, MemoryEstimate] = {}
        self._time: dict[int, StepTime] = {}
        self._compute: dict[tuple[int, int], ComputeBounds] = {}

    def __len__(self) -> int:
        return len(self.strategies)

    @overload
    def __getitem__(self, place: int) -> PricedStrategy: ...

    @overload
    def __getitem__(self, place: slice) -> list[PricedStrategy]: ...

    def __getitem__(self, place: int | slice) -> PricedStrategy | list[PricedStrategy]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        place = range(len(self))[place]
        if place not in self._priced:
            self._priced[place] = self._price(place)
        return self._priced[place]

    @property
    def looked_at(self) -> int:
        """Number of strategies that were priced so far, in memory or time."""
        return len(self._memory.keys() | self._time.keys())

    def chosen(self, prefer: Prefer) -> PricedStrategy | None:
        """Returns the least strategy that fits, or the fastest; None where none fits."""
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
        """Returns the fastest strategy that fits, where it is faster than this one."""
        return self._fastest_of(range(len(self)), chosen.time.total)

    def closest(self, among: Callable[[Strategy], bool] = lambda _: True) -> PricedStrategy | None:
        """Returns the strategy that lacks least, of several the first; None where there are none."""
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
            self._compute[key] = ComputeBounds(step, pricing.segments(micro), strategy.tensor)
        return least_seconds(self._compute[key], strategy, step.all_to_all + step.tables_reduce)

    def _least_lacking(self, place: int) -> int:
        """Returns bytes of the device's memory that a strategy lacks at least; 0 for those whose memory is priced
        without writing down a part of the model."""
        strategy, pricing = self.strategies[place], self._pricing
        if place in self._memory:
            return self._lacks(place)
        if strategy.tensor == 1:
            return 0
        state = least_state_bytes(pricing.numbers, strategy, pricing.itemsizes, pricing.data_ranks(strategy))
        return max(0, pricing.least_bytes(strategy, state) - pricing.cluster.hbm)

    def _price(self, place: int) -> PricedStrategy:
        strategy, pricing = self.strategies[place], self._pricing
        memory, time, lacking = self.memory(place), self.time(place), self._lacks(place)
        below = strategy.tables != "device"
        return PricedStrategy(
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
