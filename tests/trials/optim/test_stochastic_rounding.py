"""fp32 goes into fp16 up or down at random: exactly where it fits, and else with the right mean."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from trials.optim.rowwise_adagrad import StochasticRounding

DRAWS = 20_000


@pytest.fixture(scope="module", autouse=True)
def as_in_training() -> Iterator[None]:
    """Ranks flush denormal numbers, among which fp16's smallest must not be."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def written(value: float, rounding: StochasticRounding | None = None) -> torch.Tensor:
    """What comes of many writes of the same number."""
    table = torch.zeros(DRAWS // 4, 4, dtype=torch.float16)
    rounding = rounding or StochasticRounding(0)
    rounding.write(table, torch.arange(len(table)), torch.full(table.shape, value))
    return table


@pytest.mark.parametrize("value", [1.0001, -0.3, 0.5 - 1e-5, 2047.3, 2**-14 - 1e-8, 3e-5, 1e-7, -1e-8, 5e-10])
def test_is_one_of_the_two_neighbours_and_right_on_average(value: float) -> None:
    found = written(value)
    low, high = sorted(found.double().unique().tolist())
    assert low < value < high
    assert np.nextafter(np.float16(low), np.float16(high)) == np.float16(high)
    share = (value - low) / (high - low)
    assert (found.double() == high).double().mean().item() == pytest.approx(share, abs=2 / DRAWS**0.5)


def test_what_fp16_has_stays() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    table = every[every.isfinite()].unsqueeze(1)
    found = torch.zeros_like(table)
    StochasticRounding(0).write(found, torch.arange(len(table)), table.float())
    assert torch.equal(found, table)


def test_what_is_beyond_fp16_becomes_its_largest_and_what_is_not_finite_shows() -> None:
    assert written(7e4).eq(65504).all()
    assert written(-65519.0).eq(-65504).all()
    assert written(float("inf")).isnan().all()
    assert written(float("nan")).isnan().all()


def test_bits_follow_from_seed_and_count_alone() -> None:
    first, other = StochasticRounding(3), StochasticRounding(4)
    once, twice = written(0.3, first), written(0.3, first)
    assert not torch.equal(once, twice)
    assert not torch.equal(once, written(0.3, other))
    other.state.copy_(first.state)
    assert torch.equal(written(0.3, first), written(0.3, other))


def test_rows_are_rounded_alike_in_any_order_and_number() -> None:
    """So that ranks and devices, which write rows once or several times, agree."""
    values = torch.rand(50, 6)
    tables = [torch.zeros(50, 6, dtype=torch.float16) for _ in range(2)]
    rows = torch.randint(50, (80,))
    StochasticRounding(0).write(tables[0], torch.arange(50), values)
    StochasticRounding(0).write(tables[1], rows, values[rows])
    assert torch.equal(tables[0][rows], tables[1][rows])


def test_whole_tables_are_multiplied() -> None:
    tables = [torch.full((3000, 40), 0.1).half(), torch.ones(3, 2).half()]
    before = tables[0].double().mean().item()
    StochasticRounding(0).multiply(tables, 0.9999)
    assert tables[0].double().mean().item() == pytest.approx(0.9999 * before, rel=1e-5)
    assert len(tables[0].unique()) == 2
