"""A plan in the terminal: which strategies are shown, in which words."""

from __future__ import annotations

import io

import pytest
from priced import BATCH_SIZE, GIB, priced_ladder
from rich.console import Console

from dashboards.terminal.plan_ladder import ladder_table, selection
from trials.planner.estimates import PricedStrategy

ENOUGH, SCARCE, NOTHING = 9 * GIB, 3 * GIB, GIB


def cheapest(strategies: tuple[PricedStrategy, ...]) -> PricedStrategy | None:
    fitting = [each for each in strategies if each.fits]
    return min(fitting, key=lambda each: (len(each.strategy.techniques), each.time.total), default=None)


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("hbm", [ENOUGH, SCARCE, NOTHING])
def test_a_readable_part_of_the_ladder_has_what_is_compared(hbm: int) -> None:
    strategies = priced_ladder(hbm)
    chosen = cheapest(strategies)
    selected = selection(strategies, chosen)
    names = [each.strategy.name for each in selected]
    assert {"dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp"} <= set(names)
    assert chosen is None or chosen in selected
    assert names == [each.strategy.name for each in strategies if each.strategy.name in names]
    assert len(names) <= 20 < len(strategies)
    for size in {len(each.strategy.techniques) for each in strategies}:
        of_size = [each for each in strategies if len(each.strategy.techniques) == size]
        best = min(of_size, key=lambda each: (each.lacking_bytes, each.time.total))
        assert best in selected


def test_the_table_names_the_chosen_and_what_others_lack() -> None:
    strategies = priced_ladder(SCARCE)
    chosen = cheapest(strategies)
    text = shown(ladder_table(strategies, chosen, BATCH_SIZE))
    lines = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert len(lines) == len(strategies)
    assert [name for name, line in lines.items() if "chosen" in line] == [chosen.strategy.name]
    for each in strategies:
        assert ("lacks" in lines[each.strategy.name]) != each.fits
    assert "lacks 6.0 GiB" in lines["dp"]
