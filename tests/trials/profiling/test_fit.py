"""What is fitted: numbers that explain what was timed, found again where they are known."""

from __future__ import annotations

import random

import pytest

from dhen.memory.parts import DECLARED, Part
from dhen.memory.tape import Held
from trials.cluster.part_costs import ANY, BETWEEN, LOSS, UPDATE, PartCosts
from trials.planner.segments import Segment, segments
from trials.profiling.fit import GRADIENT_SUM, fitted
from trials.profiling.networks import BATCH, INPUTS, LAYERS, Network
from trials.profiling.timing import Timed

PER_OPERATION, PER_BYTE, PER_FLOP = 30e-6, 2e-10, 1e-11


def timed(kind: str, rng: random.Random) -> Timed:
    """A part of any size that takes exactly what its operations, bytes and FLOPs say; backward twice that."""
    operations, moved, flops = rng.randint(1, 20), rng.uniform(1e5, 1e8), rng.uniform(1e6, 1e9)
    seconds = PER_OPERATION * operations + PER_BYTE * moved + PER_FLOP * flops
    sizes = (float(operations), moved, flops, *[rng.uniform(1, 1e4) for _ in range(DECLARED - 1)])
    return Timed(kind, sizes, seconds, 2 * seconds)


def fixed(kind: str, sizes: tuple[float, ...], seconds: float) -> Timed:
    return Timed(kind, sizes, 0.0, seconds)


@pytest.fixture(scope="module")
def cases() -> list[Timed]:
    rng = random.Random(0)
    return [
        *(timed(kind, rng) for kind in ("block mlp", "sum") for _ in range(40)),
        *(fixed(UPDATE, (1, weights, 10), 1e-5 + 1e-9 * weights) for weights in (1e4, 1e5, 1e6)),
        *(fixed(LOSS, (1, batch), 2e-5 + 1e-8 * batch) for batch in (256, 1024)),
    ]


def costs(cases: list[Timed], networks: list[Network] | None = None) -> PartCosts:
    kinds = fitted(cases, networks or network_like(cases, 0.0), "fp32")
    return PartCosts(precision="fp32", threads=1, processes=1, kinds=kinds)


def network_like(cases: list[Timed], per_operation: float) -> list[Network]:
    """Two networks that take what their parts do, as fitted, and so much more for each operation."""
    placeholder = PartCosts(precision="fp32", threads=1, processes=1, kinds=kinds_of(cases))
    found = []
    for layer in LAYERS[:2]:
        its = segments(INPUTS.model((layer,)), INPUTS.schema(), "fp32", "cpu", BATCH)
        found.append(Network(its, step_of(its, placeholder) + per_operation * operations(its)))
    return found


def kinds_of(cases: list[Timed]):  # type: ignore[no-untyped-def]
    its = segments(INPUTS.model(LAYERS[:1]), INPUTS.schema(), "fp32", "cpu", BATCH)
    return fitted(cases, [Network(its, 1.0)], "fp32")


def step_of(its: tuple[Segment, ...], known: PartCosts) -> float:
    parts = sum(sum(known.of_part(part, BATCH)) for segment in its for part in segment.parts)
    weights, tensors = sum(each.parameters for each in its), sum(len(each.shapes) for each in its)
    return parts + sum(known.seconds(UPDATE, (1, weights, tensors))) + sum(known.seconds(LOSS, (1, BATCH)))


def operations(its: tuple[Segment, ...]) -> int:
    return sum(segment.operations for segment in its)


def test_known_costs_are_found_again(cases: list[Timed]) -> None:
    part = Part("block mlp", 7, Held(3000, 50_000), (2e5, 1.0, 16.0, 8.0, 128.0, 64.0))
    expected = PER_OPERATION * 7 + PER_BYTE * (3000 * 512 + 50_000) + PER_FLOP * 2e5 * 512
    found = costs(cases).of_part(part, 512)
    assert found.forward == pytest.approx(expected, rel=0.03)
    assert found.backward == pytest.approx(2 * expected, rel=0.03)


def test_no_number_is_below_zero(cases: list[Timed]) -> None:
    for cost in costs(cases).kinds.values():
        assert min((*cost.forward, *cost.backward)) >= 0.0


def test_a_kind_that_was_not_measured_takes_what_others_do(cases: list[Timed]) -> None:
    found = costs(cases)
    part = Part("block of mine", 7, Held(3000), (2e5, 1.0, 16.0, 8.0, 128.0, 64.0))
    expected = PER_OPERATION * 7 + PER_BYTE * 3000 * 512 + PER_FLOP * 2e5 * 512
    assert "block of mine" not in found.kinds
    assert ANY in found.kinds
    assert found.of_part(part, 512).forward == pytest.approx(expected, rel=0.05)


def test_sums_of_gradients_take_in_backward_what_sums_take_in_forward(cases: list[Timed]) -> None:
    cost = costs(cases).kinds[GRADIENT_SUM]
    assert max(cost.forward) == 0.0
    assert max(cost.backward) > 0.0


def test_what_networks_take_beside_their_parts_is_found(cases: list[Timed]) -> None:
    its = segments(INPUTS.model(LAYERS[:1]), INPUTS.schema(), "fp32", "cpu", BATCH)
    more = 50e-6 * operations(its)
    beside = costs(cases, network_like(cases, 50e-6)).seconds(BETWEEN, (1, operations(its)))
    assert sum(beside) == pytest.approx(more, rel=0.1)
    without = costs(cases, network_like(cases, 0.0)).seconds(BETWEEN, (1, operations(its)))
    assert sum(without) == pytest.approx(0.0, abs=0.02 * more)
