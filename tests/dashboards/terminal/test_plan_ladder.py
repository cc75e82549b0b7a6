"""A plan in the terminal: which strategies are shown, in which words."""

from __future__ import annotations

import io

import pytest
from priced import BATCH_SIZE, EXAMPLES_PER_RANK, GIB, priced, priced_ladder
from rich.console import Console

from dashboards.terminal.plan_ladder import NUMBERS, ladder_table, parts_table, reasons, seconds, selection
from trials.planner.estimates import PricedStrategy
from trials.planner.ladder import ladder

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


def test_reasons_are_for_the_chosen_and_what_has_fewer_techniques() -> None:
    strategies = priced_ladder(SCARCE)
    chosen = cheapest(strategies)
    assert chosen is not None
    assert len(chosen.strategy.techniques) == 2
    said = reasons(strategies, chosen)
    assert said[0].startswith(f"{chosen.strategy.name} needs")
    assert said[1].startswith("dp needs 9.0 GiB")
    assert "more with one technique: lack" in said[-1]
    told = {sentence.split()[0] for sentence in said[1:-1]}
    sizes = {each.strategy.name: len(each.strategy.techniques) for each in strategies}
    assert {sizes[name] for name in told} == {0, 1}


def test_reasons_where_nothing_fits_stay_few() -> None:
    said = reasons(priced_ladder(NOTHING), None)
    assert said[0].startswith("dp needs")
    assert len(said) <= 9


def test_one_rank_has_a_reason_for_each_number_of_techniques_where_nothing_fits() -> None:
    strategies = tuple(priced(strategy, 1) for strategy in ladder(1, 1, EXAMPLES_PER_RANK))
    said = reasons(strategies, None)
    most = max(len(each.strategy.techniques) for each in strategies)
    assert f"more with {NUMBERS[most]}: lack" in said[-1]


def test_parts_sum_to_what_is_shown_below_them() -> None:
    (dp, *_) = priced_ladder(SCARCE)
    text = shown(parts_table(dp))
    assert "layer0 ... layer3, each" in text
    assert "peak, forward of layer0" in text
    assert "9.0 GiB" in text
    assert "gradients" not in text  # nothing is said of what is 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.234, "1.23 s"),
        (0.99999, "1 s"),
        (0.0123, "12.3 ms"),
        (1e-5, "10 us"),
        (2.5e-8, "0.025 us"),
        (0.0, "0 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
