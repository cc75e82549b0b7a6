"""Which networks to average: greedy forward selection on validation (Caruana et al., ICML 2004), minding FLOPs.

Caruana's path starts at the best network and takes in, one after another, the network whose prediction lowers the
mean's loss most. Here any number of FLOPs may be the budget: all pairs are tried, and from each size to the next
every set goes on that no other of its size beats in both loss and FLOPs, so that pairs of cheap networks stand
beside sets that grow from the best network. Networks are not taken twice: that would fit weights to the validation
split, and cost nothing.

What is selected on validation is optimistic there: the lowest of many means of the same rows is partly luck, the
more so the more sets were tried and the shorter the split. The test split, which no choice has seen, says what is
left of the gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from trials.data.example_weights import Floats
from trials.metrics import PROBABILITY_FLOOR


class NetworkSet(NamedTuple):
    """A set of networks, with the FLOPs and the loss of the mean of their predictions."""

    members: tuple[int, ...]
    """Indices of the networks, ascending."""
    flops: float
    loss: float
    """Weighted mean cross-entropy in nats."""


class _SetValuer:
    """Works out FLOPs and loss of sets of networks."""

    def __init__(self, p_SN: Floats, weight_N: Floats | None, flops_S: Floats) -> None:
        self._p_SN, self._weight_N, self._flops_S = p_SN, weight_N, flops_S

    def value(self, members: tuple[int, ...]) -> NetworkSet:
        """The set with its loss: the mean's probability of what happened is the mean of the members'."""
        p_N = sum((self._p_SN[index] for index in members), start=np.zeros(self._p_SN.shape[1]))
        loss_N = -np.log(np.maximum(p_N / len(members), PROBABILITY_FLOOR))
        flops = float(self._flops_S[list(members)].sum())
        return NetworkSet(members, flops, float(np.average(loss_N, weights=self._weight_N)))


def chosen_averages(p_SN: Floats, weight_N: Floats | None, flops_S: Floats, *, most: int) -> list[NetworkSet]:
    """Sets of two networks or more that no other set and no single network beats in both, by FLOPs.

    Args:
        p_SN: the probability that each of S networks gave, in each of N rows, to what happened.
        weight_N: weights of the rows; None where all rows count alike.
        flops_S: FLOPs of the networks.
        most: largest number of networks in a set.
    """
    valuer = _SetValuer(p_SN, weight_N, flops_S)
    alone = [valuer.value((index,)) for index in range(len(flops_S))]
    level, tried = alone, alone
    for _ in range(2, most + 1):
        level = _unbeaten(valuer.value(members) for members in _one_more(level, len(flops_S)))
        tried = tried + level
    return [network_set for network_set in _unbeaten(tried) if len(network_set.members) > 1]


def _one_more(level: list[NetworkSet], networks: int) -> list[tuple[int, ...]]:
    """The sets of one network more: each set with each network that it lacks, once."""
    grown = {
        tuple(sorted((*network_set.members, index)))
        for network_set in level
        for index in range(networks)
        if index not in network_set.members
    }
    return sorted(grown)


def _unbeaten(sets: Iterable[NetworkSet]) -> list[NetworkSet]:
    """Sets in order of FLOPs, each with a lower loss than all cheaper ones."""
    front: list[NetworkSet] = []
    lowest = math.inf
    for network_set in sorted(
        sets, key=lambda network_set: (network_set.flops, network_set.loss, network_set.members)
    ):
        if network_set.loss < lowest:
            lowest = network_set.loss
            front.append(network_set)
    return front
