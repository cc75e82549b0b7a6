"""Which networks to average: greedy selection against all sets there are, on made-up predictions."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from search.analysis.averages import chosen_averages

Floats = NDArray[np.float64]
Set = tuple[int, ...]


def made_up(seed: int, networks: int = 6, rows: int = 400) -> tuple[Floats, Floats, Floats]:
    """Probabilities of what happened, weights of rows, FLOPs; networks err partly alike, partly apart."""
    rng = np.random.default_rng(seed)
    signal_N = rng.normal(0.5, 1.0, rows)
    noise_SN = rng.normal(0.0, 1.0, (networks, rows)) * rng.uniform(0.9, 1.3, (networks, 1))
    p_SN = 1.0 / (1.0 + np.exp(-signal_N - noise_SN))
    return p_SN, rng.choice([1.0, 3.0], rows), rng.uniform(1.0, 4.0, networks)


def brute_force(p_SN: Floats, weight_N: Floats, flops_S: Floats, most: int) -> dict[Set, tuple[float, float]]:
    """FLOPs and loss of every set of at most so many networks."""
    sets = [s for size in range(1, most + 1) for s in combinations(range(len(flops_S)), size)]
    return {
        s: (
            float(flops_S[list(s)].sum()),
            -float(np.average(np.log(p_SN[list(s)].mean(axis=0)), weights=weight_N)),
        )
        for s in sets
    }


def unbeaten(sets: dict[Set, tuple[float, float]]) -> list[Set]:
    """By FLOPs."""

    def beaten(s: Set) -> bool:
        flops, loss = sets[s]
        return any(f <= flops and at <= loss and (f, at) != (flops, loss) for f, at in sets.values())

    return sorted((s for s in sets if not beaten(s)), key=lambda s: sets[s])


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_those_of_brute_force(seed: int) -> None:
    p_SN, weight_N, flops_S = made_up(seed)
    every = brute_force(p_SN, weight_N, flops_S, 2)
    found = chosen_averages(p_SN, weight_N, flops_S, most=2)
    assert [each.members for each in found] == [s for s in unbeaten(every) if len(s) == 2]
    assert found
    for each in found:
        assert (each.flops, each.loss) == pytest.approx(every[each.members])


@pytest.mark.parametrize("seed", range(5))
def test_larger_sets(seed: int) -> None:
    """None beats another, the lowest loss is Caruana's or lower, and hardly above the lowest there is."""
    p_SN, weight_N, flops_S = made_up(seed)
    every = brute_force(p_SN, weight_N, flops_S, 4)
    found = chosen_averages(p_SN, weight_N, flops_S, most=4)
    values = {each.members: (each.flops, each.loss) for each in found}
    assert unbeaten(values) == list(values)
    path: Set = ()
    lowest = math.inf
    for _ in range(4):
        rest = set(range(len(flops_S))) - set(path)
        path = min((tuple(sorted((*path, i))) for i in rest), key=lambda s: every[s][1])
        lowest = min(lowest, every[path][1])
    assert found[-1].loss <= lowest + 1e-12
    assert found[-1].loss <= 1.002 * min(loss for _, loss in every.values())


def test_two_cheap_networks_beside_what_grows_from_the_best() -> None:
    """Cheap ones that err on different rows make the best mean below the best network's FLOPs."""
    good, bad = 0.9, 0.4
    p_SN = np.array([[good, bad] * 50, [bad, good] * 50, [0.75, 0.75] * 50])
    found = chosen_averages(p_SN, None, np.array([1.0, 1.0, 9.0]), most=3)
    assert found[0].members == (0, 1)
    assert found[0].flops == 2.0
