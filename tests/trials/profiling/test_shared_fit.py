"""What is fitted to ranks that share a training: numbers that explain what was timed, found again where they are
known."""

from __future__ import annotations

import random

import pytest

from trials.cluster.part_costs import dot
from trials.cluster.shared_costs import SharedCosts
from trials.profiling.engines import ALONE, EngineTimed
from trials.profiling.on_ranks import SharedMeasured, SharedSetting
from trials.profiling.sharded_tables import TablesTimed
from trials.profiling.shared_fit import shared_costs_of

PASSES, REDUCED, UPDATE = (1e-3, 5e-4, 2e-5, 1e-9), (2e-3, 1e-4, 0.0, 2e-9), (1e-4, 0.0, 1e-5, 5e-10)
WAITS, COUNTING = (4e-3, 0.1, 1e-9), (1e-3, 5e-5)
TABLES = (2e-3, 1e-4, 1e-9, 1e-8, 1e-3, 5e-5, 2e-9)
OPERATIONS = 20


def engines(rng: random.Random, counting: float = 0.0) -> list[EngineTimed]:
    """Networks of any size under an engine of known costs, beside the same compute alone."""
    found = []
    for _ in range(12):
        sizes = (1.0, rng.uniform(2, 6), rng.uniform(10, 80), rng.uniform(1e4, 4e6))
        compute, tables = rng.uniform(1e-3, 3e-2) + counting, rng.uniform(4e-3, 8e-3)
        waiting = compute + dot(PASSES, sizes)
        reduced = waiting + dot(REDUCED, sizes)
        update = dot(UPDATE, sizes)
        whole = reduced + update + tables + dot(WAITS, (1.0, compute, sizes[-1]))
        found.append(EngineTimed(ALONE, sizes, OPERATIONS, compute, compute, 1e-4, 0.0, tables))
        found.append(EngineTimed("zero1", sizes, OPERATIONS, waiting, reduced, update, whole, 0.0))
    return found


def tables(rng: random.Random) -> list[TablesTimed]:
    found = []
    for _ in range(20):
        sharded, copied = rng.choice((0, 1)), rng.choice((0, 1))
        sizes = (
            *(float(sharded), *(sharded * rng.uniform(0, most) for most in (40, 1e6, 1e5))),
            *(float(copied), *(copied * rng.uniform(0, most) for most in (30, 5e5))),
        )
        local = rng.uniform(1e-4, 2e-3)
        found.append(TablesTimed(sizes, local + dot(TABLES, sizes), local))
    return found


def fitted(counted: bool = False, with_tables: bool = True) -> SharedCosts:
    its = tables(random.Random(1)) if with_tables else []
    timed = engines(random.Random(0), dot(COUNTING, (1, OPERATIONS)) if counted else 0.0)
    uncounted = [each for each in engines(random.Random(0)) if each.engine == ALONE] if counted else []
    setting = SharedSetting("fp32", 1, 1, 2, counted)
    return shared_costs_of([SharedMeasured(timed, uncounted, its, {"all_reduce": (1e-3, 1e-9)})] * 2, setting)


def test_known_costs_of_an_engine_are_found_again() -> None:
    found, sizes = fitted().engines["zero1"], (1.0, 4.0, 50.0, 1e6)
    assert list(fitted().engines) == ["zero1"]
    assert dot(found.passes, sizes) == pytest.approx(dot(PASSES, sizes), rel=0.02)
    assert dot(found.reduced, sizes) == pytest.approx(dot(REDUCED, sizes), rel=0.02)
    assert dot(found.update, sizes) == pytest.approx(dot(UPDATE, sizes), rel=0.02)


def test_what_ranks_wait_for_each_other_is_found_in_whole_steps() -> None:
    assert fitted().waits == pytest.approx(WAITS, rel=0.05)


def test_what_tensor_groups_send_is_the_mean_over_ranks() -> None:
    assert fitted().collectives == {"all_reduce": pytest.approx((1e-3, 1e-9))}


def test_known_costs_of_tables_are_found_again() -> None:
    sizes = (1.0, 20.0, 5e5, 5e4, 1.0, 10.0, 2e5)
    found = fitted().tables
    assert found is not None
    assert dot(found, sizes) == pytest.approx(dot(TABLES, sizes), rel=0.02)


def test_without_torchrec_tables_have_no_costs() -> None:
    assert fitted(with_tables=False).tables is None


def test_counting_is_what_compute_alone_takes_longer() -> None:
    assert dot(fitted(counted=True).counting, (1, OPERATIONS)) == pytest.approx(
        dot(COUNTING, (1, OPERATIONS)), rel=0.02
    )
    assert fitted().counting == (0.0, 0.0)


def test_no_number_is_below_zero() -> None:
    found = fitted(counted=True)
    assert found.tables is not None
    numbers = [*found.tables, *found.waits, *found.counting]
    for cost in found.engines.values():
        numbers += [*cost.passes, *cost.reduced, *cost.update]
    assert min(numbers) >= 0.0
