"""A plan in the terminal: the ladder of strategies, the reasons, and the items of the chosen strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from dashboards.names import MISSING, byte_size, si
from trials.planner.estimates import MemoryEstimate, PricedStrategy, StepTime

BEST_PER_SIZE = 3
"""Strategies shown of each number of techniques, beside those that only hold the state in one of the ways."""
REASONS_PER_SIZE = 5
"""Sentences on rejected strategies of each number of techniques; one if nothing fits, so that more is said
of what would."""
NUMBERS = (
    "no technique",
    "one technique",
    "two techniques",
    "three techniques",
    "four techniques",
    "five techniques",
)


def selection(strategies: Sequence[PricedStrategy], chosen: PricedStrategy | None) -> list[PricedStrategy]:
    """Strategies to compare, in the ladder's order: each way to hold the state, each tensor parallel degree by
    itself, and the best few of each size.

    Best are the fastest of those that fit, then those that lack least; of several numbers of micro-batches
    one is enough.
    """
    wanted = [
        priced
        for priced in strategies
        if not set(priced.strategy.techniques) - {priced.strategy.dense}
        or (_size(priced) == 1 and priced.strategy.tensor > 1)
    ]
    for _, group in groupby(strategies, key=_size):
        families: dict[str, PricedStrategy] = {}
        for priced in sorted(group, key=_rank):
            families.setdefault(priced.strategy.held_as, priced)
        wanted += list(families.values())[:BEST_PER_SIZE]
    names = {priced.strategy.name for priced in [*wanted, *([chosen] if chosen else [])]}
    return [priced for priced in strategies if priced.strategy.name in names]


def ladder_table(shown: Iterable[PricedStrategy], chosen: PricedStrategy | None, batch_size: int) -> Table:
    """A row per strategy, the chosen one marked by a word; `batch_size` is the number of examples of a step."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("strategy", overflow="fold")
    for name in ("memory per rank", "step", "examples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for priced in shown:
        cells = (
            priced.strategy.name,
            byte_size(priced.memory.total),
            seconds(priced.time.total),
            si(batch_size / priced.seconds_per_batch),
            _verdict(priced, chosen),
        )
        style = "bold green" if priced is chosen else "" if priced.fits else "dim"
        table.add_row(*map(Text, cells), style=style)
    return table


def reasons(strategies: Sequence[PricedStrategy], chosen: PricedStrategy | None) -> list[str]:
    """A sentence for the chosen strategy and for each with fewer techniques; of many, those that lack least.

    Where nothing is chosen, each number of techniques has one sentence, for the strategy that lacks least.
    """
    sentences = [chosen.reason] if chosen else []
    for size, group in groupby(strategies, key=_size):
        if chosen is not None and size >= _size(chosen):
            break
        rejected = sorted((priced for priced in group if priced is not chosen), key=_rank)
        count = REASONS_PER_SIZE if chosen is not None else 1
        sentences += [priced.reason for priced in rejected[:count]]
        rest = rejected[count:]
        if rest:
            least, most = byte_size(rest[0].lacking_bytes), byte_size(rest[-1].lacking_bytes)
            sentences.append(f"{len(rest)} more with {NUMBERS[size]}: lack {least} to {most}.")
    return sentences


def parts_table(priced: PricedStrategy) -> Table:
    """Memory and step time of one strategy by item, side by side; items that are 0 are left out."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    columns = ("memory per rank", ""), ("step", "")
    for name, numbers in columns:
        table.add_column(name, no_wrap=True)
        table.add_column(numbers, justify="right", no_wrap=True)
    left, right = _memory(priced.memory), _time(priced.time)
    for index in range(max(len(left), len(right))):
        memory = left[index] if index < len(left) else ("", "")
        time = right[index] if index < len(right) else ("", "")
        table.add_row(*map(Text, (*memory, *time)))
    return table


def seconds(value: float) -> str:
    """A time in three digits: `12.3 ms`, `1.23 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 0.9995:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e6:.2g} us" if value else "0 s"


def _size(priced: PricedStrategy) -> int:
    return len(priced.strategy.techniques)


def _rank(priced: PricedStrategy) -> tuple[float, float]:
    return priced.lacking_bytes, priced.time.total


def _verdict(priced: PricedStrategy, chosen: PricedStrategy | None) -> str:
    if not priced.fits:
        return f"lacks {byte_size(priced.lacking_bytes)}"
    return "fits, chosen" if priced is chosen else "fits"


def _memory(memory: MemoryEstimate) -> list[tuple[str, str]]:
    items = memory.model_dump(exclude={"activations_by_layer", "host", "margin", "peak_at", "servers"})
    rows = []
    for name, value in items.items():
        if value:
            rows.append((_words(name), byte_size(value)))
        if name == "activations":
            rows += [
                (f"  {layer}", byte_size(activations))
                for layer, activations in _layers(memory)
                if activations
            ]
    host = [("host memory (offload)", byte_size(memory.host))] if memory.host else []
    host += [("servers on a host", byte_size(memory.servers))] if memory.servers else []
    margin = [("with the margin", byte_size(memory.needed))] if memory.margin else []
    return [*rows, (f"peak, {memory.peak_at}", byte_size(memory.total)), *margin, *host]


def _layers(memory: MemoryEstimate) -> Iterable[tuple[str, int]]:
    """Activations by layer; equal neighbours are one entry."""
    for value, group in groupby(memory.activations_by_layer, key=lambda pair: pair[1]):
        names = [name for name, _ in group]
        yield (names[0], value) if len(names) == 1 else (f"{names[0]} ... {names[-1]}, each", value)


def _time(time: StepTime) -> list[tuple[str, str]]:
    items = time.model_dump(exclude={"hidden", "total"})
    rows = [(_words(name), seconds(value)) for name, value in items.items() if value]
    hidden = [("hidden behind compute", f"-{seconds(time.hidden)}")] if time.hidden else []
    return [*rows, *hidden, ("step", seconds(time.total) if time.total else MISSING)]


def _words(name: str) -> str:
    return name.replace("_", " ")
