"""Times cases in this process, with caches as cold as in a step: between two runs other memory is read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from trials.cluster.machine import Precision
from trials.memory.malloc import keep_freed_memory
from trials.profiling.cases import Case, cases
from trials.profiling.networks import Network, timed_networks

ROUNDS = 2
"""Largest number of rounds in which everything is timed: other work that takes the cores disturbs one of them."""
FEWEST, MOST, SECONDS = 2, 7, 0.03
"""Runs of a case in a round: as many as take so long together, within bounds; after one that does not count."""
OTHER_VALUES = 2_000_000
"""fp32 numbers that are read between two runs, more than the caches of a core hold."""


class Timed(NamedTuple):
    """Seconds of a case: the least of the rounds' medians."""

    kind: str
    sizes: tuple[float, ...]
    forward: float
    backward: float


class Measured(NamedTuple):
    """What one process has timed."""

    cases: list[Timed]
    networks: list[Network]


def time_everything(precision: Precision, threads: int, until: float = math.inf) -> Measured:
    """Times everything in this process, which is left with these threads and keeps freed memory, as a training
    does; once more where that is expected to end before `until`, in seconds of `time.monotonic`."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    keep_freed_memory()
    other = torch.zeros(OTHER_VALUES)
    rounds: list[tuple[list[Timed], list[Network]]] = []
    began = time.monotonic()
    while not rounds or (
        len(rounds) < ROUNDS and time.monotonic() + (time.monotonic() - began) / len(rounds) < until
    ):
        rounds.append(([_timed(case, other) for case in cases(precision)], list(timed_networks(precision))))
    timed, networks = zip(*rounds, strict=True)
    return Measured(
        [_least(each) for each in zip(*timed, strict=True)],
        [min(each, key=lambda network: network.seconds) for each in zip(*networks, strict=True)],
    )


def _least(rounds: Sequence[Timed]) -> Timed:
    """Returns a case with the least seconds of all rounds, forward and backward apart."""
    forward, backward = min(each.forward for each in rounds), min(each.backward for each in rounds)
    return rounds[0]._replace(forward=forward, backward=backward)


def _timed(case: Case, other: Tensor) -> Timed:
    _once(case, other)
    seconds = [_once(case, other)]
    runs = min(MOST, max(FEWEST, round(SECONDS / sum(seconds[0]))))
    seconds += [_once(case, other) for _ in range(runs - 1)]
    forward, backward = zip(*seconds, strict=True)
    return Timed(case.kind, case.sizes, median(forward), median(backward))


def _once(case: Case, other: Tensor) -> tuple[float, float]:
    other.add_(1.0)
    began = time.perf_counter()
    output = case.forward()
    between = time.perf_counter()
    case.backward(output)
    return between - began, time.perf_counter() - between
