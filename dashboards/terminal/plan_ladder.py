"""A plan in the terminal: the ladder of strategies, the reasons, and the items of the chosen strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest

from rich.table import Table
from rich.text import Text

from dashboards.names import MISSING, byte_size, si
from trials.planner.estimates import PricedStrategy

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
        verdict = "fits, chosen" if priced is chosen else "fits"
        if not priced.fits:
            verdict = f"lacks {byte_size(priced.lacking_bytes)}"
        cells = (
            priced.strategy.name,
            byte_size(priced.memory.total),
            seconds(priced.time.total),
            si(batch_size / priced.seconds_per_batch),
            verdict,
        )
        style = "bold green" if priced is chosen else "" if priced.fits else "dim"
        table.add_row(*map(Text, cells), style=style)
    return table


def reasons(strategies: Sequence[PricedStrategy], chosen: PricedStrategy | None) -> list[str]:
    """A sentence for the chosen strategy and for each with fewer techniques; of many, those that lack least.

    If nothing is chosen, each number of techniques has one sentence, for the strategy that lacks least.
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
    memory, time = priced.memory, priced.time
    items = memory.model_dump(exclude={"activations_by_layer", "host", "margin", "peak_at", "servers"})
    left = []
    for name, value in items.items():
        if value:
            left.append((name.replace("_", " "), byte_size(value)))
        if name == "activations":
            # equal neighbours are one entry
            for size, group in groupby(memory.activations_by_layer, key=lambda pair: pair[1]):
                layers = [layer for layer, _ in group]
                several = f"{layers[0]} ... {layers[-1]}, each"
                entry = (f"  {layers[0] if len(layers) == 1 else several}", byte_size(size))
                left += [entry] if size else []
    left.append((f"peak, {memory.peak_at}", byte_size(memory.total)))
    left += [("with the margin", byte_size(memory.needed))] if memory.margin else []
    left += [("host memory (offload)", byte_size(memory.host))] if memory.host else []
    left += [("servers on a host", byte_size(memory.servers))] if memory.servers else []
    step = time.model_dump(exclude={"hidden", "total"})
    right = [(name.replace("_", " "), seconds(value)) for name, value in step.items() if value]
    right += [("hidden behind compute", f"-{seconds(time.hidden)}")] if time.hidden else []
    right.append(("step", seconds(time.total) if time.total else MISSING))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title, numbers in (("memory per rank", ""), ("step", "")):
        table.add_column(title, no_wrap=True)
        table.add_column(numbers, justify="right", no_wrap=True)
    for row in zip_longest(left, right, fillvalue=("", "")):
        table.add_row(*(Text(cell) for entry in row for cell in entry))
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
