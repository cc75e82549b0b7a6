"""Times what ranks that split modules send each other, by itself: small tensors, and some whose bytes count.

All ranks take part. Groups of fewer send at the same time as each other, and share the cores as all ranks do here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.memory.tape import FP32_BYTES

NUMBERS = 256, 262_144
"""Lengths of what is sent."""
WARM_UP, REPEATS = 5, 15


def timed_collectives(world: int) -> dict[str, tuple[float, float]]:
    """Returns the seconds of an all-reduce and of an all-gather, for any size and for each byte of the whole
    tensor; a collective."""
    kinds: dict[str, tuple[int, Callable[[Tensor], object]]] = {
        "all_reduce": (1, dist.all_reduce),
        "all_gather": (world, lambda x: dist.all_gather(list(x.new_empty(world, len(x)).unbind()), x)),
    }
    found = {}
    for name, (parts, run) in kinds.items():
        small, large = (_seconds(run, torch.zeros(numbers)) for numbers in NUMBERS)
        more_bytes = FP32_BYTES * parts * (NUMBERS[1] - NUMBERS[0])
        each = max(large - small, 0.0) / more_bytes
        found[name] = max(small - each * FP32_BYTES * parts * NUMBERS[0], 0.0), each
    return found


def _seconds(run: Callable[[Tensor], object], x: Tensor) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        began = time.perf_counter()
        run(x)
        times.append(time.perf_counter() - began)
    return median(times[WARM_UP:])
