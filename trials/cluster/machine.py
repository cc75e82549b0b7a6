"""What this machine is: the device to train on, threads, and which precision multiplies faster."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]
BF16_GAIN = 1.3
"""bf16 is chosen if its matmul is at least this many times faster: below, casts eat the gain."""
THREADS_GAIN = 1.1
"""More threads are taken if a step is at least this many times faster."""
MEASUREMENTS, PAUSE_SECONDS = 5, 0.05
"""Number of measurements of the matmul peak, and seconds between two of them."""
PRODUCT_SIZE = 1024
"""Rows and columns of the matrices multiplied, if no other size is wanted."""
SMALLEST_PRODUCT, LONGEST_PRODUCT_SECONDS = 128, 0.25
"""A measurement begins with products of this size. It doubles the size while a product of that is expected to take
less than so many seconds."""


@dataclass(frozen=True, kw_only=True)
class MatmulPeak:
    """Measured matrix products, in FLOP/s."""

    fp32: float
    bf16: float

    def or_better(self, other: MatmulPeak) -> MatmulPeak:
        """The larger of two measurements, by precision."""
        return MatmulPeak(fp32=max(self.fp32, other.fp32), bf16=max(self.bf16, other.bf16))


def device() -> torch.device:
    """Returns the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Returns the processor's name, such as `Intel(R) Xeon(R) Processor @ 2.80GHz, 2 cores`."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def machine_name() -> str:
    """Returns the name of the device that trains and scores here."""
    where = device()
    return processor_name() if where.type == "cpu" else torch.cuda.get_device_name(where)


@cache
def matmul_peak(size: int) -> MatmulPeak:
    """The largest of several measurements a moment apart: other work that takes the cores slows one of them."""
    best = measured_matmul(size)
    for _ in range(MEASUREMENTS - 1):
        time.sleep(PAUSE_SECONDS)
        best = best.or_better(measured_matmul(size))
    return best


def measured_matmul(size: int) -> MatmulPeak:
    """One measurement: the best of a few square products of `size`, by precision, on this machine's device."""
    return MatmulPeak(
        fp32=_flops_per_second(torch.float32, size),
        bf16=_flops_per_second(torch.bfloat16, size),
    )


def _flops_per_second(dtype: torch.dtype, size: int) -> float:
    """Returns the speed of products of `size`, or of the largest that do not take long: a CPU without instructions
    for bf16 takes seconds for a bf16 product of 1,024."""
    where = device()
    drawn = torch.Generator(where).manual_seed(0)  # trainings draw from the others
    width = min(SMALLEST_PRODUCT, size)
    while True:
        # products of equal numbers take less power, so that a GPU's clock stays higher than in a training
        a = torch.randn(width, width, device=where, generator=drawn).to(dtype)
        seconds = best_seconds(partial(torch.matmul, a, a), where, repeats=2)
        if width == size or 8 * seconds > LONGEST_PRODUCT_SECONDS:
            return 2.0 * width**3 / seconds
        width = min(2 * width, size)


def best_seconds(run: Callable[[], object], where: torch.device, repeats: int = 5) -> float:
    """Returns the seconds of the fastest of a few runs on the device `where`, each waited for; one more run before
    warms up."""
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        best = min(best, time.perf_counter() - start)
    return best


@cache
def preferred_precision() -> Precision:
    """Returns what `precision=auto` means on this machine."""
    peak = matmul_peak(PRODUCT_SIZE)
    return "bf16" if peak.bf16 > BF16_GAIN * peak.fp32 else "fp32"


@cache
def fastest_threads(limit: int) -> int:
    """Returns which of 1, 2, 4 ... and `limit` threads train a small model fastest; measured, a second at most.

    More threads are taken only if they gain a tenth. Beside an accelerator, where threads do other work, it is
    the limit.
    """
    if limit == 1 or device().type != "cpu":
        return limit
    counts = [1 << power for power in range(limit.bit_length()) if 1 << power < limit] + [limit]
    before = torch.get_num_threads()
    seconds = {}
    for threads in counts:
        torch.set_num_threads(threads)
        seconds[threads] = _step_seconds()
    torch.set_num_threads(before)
    best = counts[0]
    for threads in counts[1:]:
        if seconds[threads] < seconds[best] / THREADS_GAIN:
            best = threads
    return best


def _step_seconds() -> float:
    """Returns the seconds of the fastest of a few training steps of an MLP, in the precision preferred here."""
    dtype = torch.bfloat16 if preferred_precision() == "bf16" else torch.float32
    batch, width, layers = 512, 256, 3
    x = torch.ones(batch, width, dtype=dtype)
    modules = [module for _ in range(layers) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*modules).to(dtype)
    return best_seconds(lambda: model(x).sum().backward(), x.device)
