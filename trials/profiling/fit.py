"""Seconds for each size of a part, from what was timed: least squares of relative errors, no number below zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from dhen.inputs.features import ADMISSION
from trials.cluster.machine import Precision
from trials.cluster.part_costs import ANY, BETWEEN, LOSS, UPDATE, KindCost, PartCosts
from trials.profiling.networks import BATCH, Network
from trials.profiling.timing import Timed

GRADIENT_SUM, SUM = "gradient sum", "sum"
"""Kinds of the sum of two gradients, which is that of two tensors, in backward."""
DECLARED_FROM = 2
"""Place of the first size that is declared; before it are operations and traffic."""
GENERAL = 3
"""Number of sizes that mean the same for all kinds: operations, traffic, FLOPs."""
RIDGE = 1e-3
"""Weight of the numbers' own size: with few measurements, sizes that rise together share what they explain."""


def fitted(cases: Sequence[Timed], networks: Sequence[Network], precision: Precision) -> dict[str, KindCost]:
    """Returns what every kind costs."""
    by_kind: dict[str, list[Timed]] = defaultdict(list)
    for case in cases:
        by_kind[case.kind].append(case)
    nothing = (0.0,) * DECLARED_FROM
    by_kind[GRADIENT_SUM] = [
        Timed(GRADIENT_SUM, (*nothing, *case.sizes[DECLARED_FROM:]), 0.0, case.forward)
        for case in by_kind[SUM]
    ]
    kinds = {kind: _fit(timed) for kind, timed in by_kind.items()}
    parts = [case for case in cases if case.kind not in (UPDATE, LOSS, ADMISSION) and case.sizes[0]]
    general = [case._replace(sizes=case.sizes[:GENERAL]) for case in parts]
    rest = (0.0,) * (len(parts[0].sizes) - GENERAL)
    cost = _fit(general)
    kinds[ANY] = KindCost(forward=(*cost.forward, *rest), backward=(*cost.backward, *rest))
    return kinds | {BETWEEN: _between(kinds, networks, precision)}


def _fit(cases: Sequence[Timed]) -> KindCost:
    sizes = np.array([case.sizes for case in cases], dtype=np.float64)
    return KindCost(
        forward=_seconds(sizes, np.array([case.forward for case in cases])),
        backward=_seconds(sizes, np.array([case.backward for case in cases])),
    )


def _seconds(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, ...]:
    """Returns the seconds for one of each size."""
    seen = seconds > 0.0
    largest = sizes.max(axis=0)
    scale = np.where(largest > 0.0, largest, 1.0)
    if not seen.any():
        return (0.0,) * len(scale)
    relative = sizes[seen] / scale / seconds[seen, np.newaxis]
    rows = np.vstack([relative, RIDGE * np.eye(len(scale))])
    found, _ = nnls(rows, np.concatenate([np.ones(len(relative)), np.zeros(len(scale))]))
    return tuple(float(each) for each in found / scale)


def _between(kinds: dict[str, KindCost], networks: Sequence[Network], precision: Precision) -> KindCost:
    """Returns what whole steps take beside their parts, by operation: least squares of the steps' relative
    errors."""
    costs = PartCosts(precision=precision, threads=1, processes=1, kinds=kinds)
    sizes, left = [], []
    for network in networks:
        operations = sum(segment.operations for segment in network.segments)
        sizes.append((1.0 / network.seconds, operations / network.seconds))
        left.append(1.0 - _parts_seconds(costs, network) / network.seconds)
    scale = np.max(sizes, axis=0)
    found, _ = nnls(np.array(sizes) / scale, np.array(left))
    each = tuple(float(number) for number in found / scale)
    return KindCost(forward=each, backward=(0.0, 0.0))


def _parts_seconds(costs: PartCosts, network: Network) -> float:
    """Returns the sum over a step's parts."""
    segments = network.segments
    parts = sum(sum(costs.of_part(part, BATCH)) for segment in segments for part in segment.parts)
    weights = sum(segment.parameters for segment in segments)
    tensors = sum(len(segment.shapes) for segment in segments)
    return parts + sum(costs.seconds(UPDATE, (1, weights, tensors))) + sum(costs.seconds(LOSS, (1, BATCH)))
