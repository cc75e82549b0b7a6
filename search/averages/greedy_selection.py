"""Which networks to average: greedy forward selection on validation (Caruana et al., ICML 2004), minding FLOPs.

Caruana's path starts at the best network and takes in, one after another, the network whose prediction lowers the
mean's loss most. Here a budget may be any: all pairs are tried, and from each size to the next every set goes on
that no other of its size beats in both loss and FLOPs, so that pairs of cheap networks stand beside what grows
from the best one. Networks are not taken twice: that would fit weights to the validation split, and cost nothing.

What is selected on validation is optimistic there: the lowest of many means of the same rows is partly luck, the
more so the more sets were tried and the shorter the split. The test split, which no choice has seen, says what is
left of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from trials.data.example_weights import Floats
from trials.metrics import PROBABILITY_FLOOR


class NetworkSet(NamedTuple):
    """A set of networks and what its mean comes to."""

    members: tuple[int, ...]
    """Their places, ascending."""
    flops: float
    loss: float
    """Weighted mean cross-entropy in nats."""


class _SetValuer:
    """Means of networks, valued."""

    def __init__(self, p_SN: Floats, weight_N: Floats | None, flops_S: Floats) -> None:
        self._p_SN, self._weight_N, self._flops_S = p_SN, weight_N, flops_S

    def value(self, members: tuple[int, ...]) -> NetworkSet:
        """The mean's probability of what happened is the mean of the members'."""
        p_N = sum((self._p_SN[place] for place in members), start=np.zeros(self._p_SN.shape[1]))
        loss_N = -np.log(np.maximum(p_N / len(members), PROBABILITY_FLOOR))
        flops = float(self._flops_S[list(members)].sum())
        return NetworkSet(members, flops, float(np.average(loss_N, weights=self._weight_N)))


def chosen_averages(p_SN: Floats, weight_N: Floats | None, flops_S: Floats, *, most: int) -> list[NetworkSet]:
    """Sets of two networks or more that no other set found, and no network alone, beats in both, by FLOPs.

    Args:
        p_SN: the probability that each of S networks gave, in each of N rows, to what happened.
        weight_N: of the rows; None where all count alike.
        flops_S: of the networks.
        most: networks in a set.
    """
    sets = _SetValuer(p_SN, weight_N, flops_S)
    alone = [sets.value((place,)) for place in range(len(flops_S))]
    level, found = alone, alone
    for _ in range(2, most + 1):
        level = _unbeaten(sets.value(members) for members in _one_more(level, len(flops_S)))
        found = found + level
    return [candidate for candidate in _unbeaten(found) if len(candidate.members) > 1]


def _one_more(level: list[NetworkSet], networks: int) -> list[tuple[int, ...]]:
    """Each set with each network that it lacks, once."""
    grown = {
        tuple(sorted((*candidate.members, place)))
        for candidate in level
        for place in range(networks)
        if place not in candidate.members
    }
    return sorted(grown)


def _unbeaten(sets: Iterable[NetworkSet]) -> list[NetworkSet]:
    """By FLOPs, each with a lower loss than all cheaper ones."""
    front: list[NetworkSet] = []
    lowest = math.inf
    for candidate in sorted(sets, key=lambda candidate: (candidate.flops, candidate.loss, candidate.members)):
        if candidate.loss < lowest:
            lowest = candidate.loss
            front.append(candidate)
    return front
