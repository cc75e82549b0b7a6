"""How long a forward pass of an exported model takes: a request of so many rows, evaluation mode, fp32.

Requests are of different validation rows in turn, so that tables are read in other places each time, after a
few that warm up. The time does not depend on what the weights are, so fresh ones do for a candidate that has not
been trained (a sparse mixture of experts sends rows elsewhere with other weights, as many to each expert or not).

The clock. Candidates train side by side, and a request that waits for a core says nothing of the model. With one
thread on a CPU the whole pass runs in the calling thread, whose own CPU time (`time.thread_time`) leaves out
whatever others had the core for: on a core of its own that is the wall clock. With several threads, or on an
accelerator, nothing but the wall clock says how long a request takes; then no other training of the study may
run (`search.planning.serving_gate.side_by_side`).

The quantile. What neighbours take of caches, and of a core whose second hardware thread they have, still slows
many requests down, so it is the fastest tenth that stands for one that is left alone. One network, measured
eight times on two cores while some twenty processes wanted them (2026-11-21): the median by the wall clock was
1.0 to 12 ms, the median of CPU time 0.98 to 1.52 ms, its first decile 0.72 to 0.82 ms.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
import torch
from torch import nn

from dhen.batch import FeatureBatch
from dhen.model import build_model
from trials.cluster.machine import device, machine_name
from trials.data.cache import PreparedLog
from trials.data.loader import feature_batch
from trials.data.rows import EncodedRows
from trials.job import Job
from trials.serving_limits import ForwardTime, ServingConfig

REQUESTS = 8
"""Number of different requests at most, taken in turn."""
WARM_UP, FEWEST = 3, 7
"""Number of requests before the clock counts, and the least number that it counts."""
BUDGET_SECONDS = 0.2
"""Seconds of counted requests, where the least number takes less."""


def candidate_time(job: Job, log: PreparedLog, serving: ServingConfig) -> ForwardTime:
    """Returns the forward time of a job's model with fresh weights, on validation rows of its log."""
    return forward_time(build_model(job.model, job.features), log.split("validation").inputs, serving)


def forward_time(model: nn.Module, rows: EncodedRows, serving: ServingConfig) -> ForwardTime:
    """Returns the forward time of a model on these rows, which are repeated where they are fewer than a request
    has.

    The model is left in evaluation mode on the device that scores here.
    """
    where = device()
    model = model.to(where).eval()
    requests = cycle([request.to(where) for request in _requests(rows, serving.batch)])
    clock = time.perf_counter if where.type != "cpu" or serving.threads > 1 else time.thread_time

    def once() -> float:
        request = next(requests)
        began = clock()
        model(request)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return clock() - began

    with torch.inference_mode(), _threads(serving.threads):
        seconds = _undisturbed(_measured(once))
    return ForwardTime(
        ms=1000.0 * seconds, batch=serving.batch, threads=serving.threads, machine=machine_name()
    )


def _measured(once: Callable[[], float]) -> list[float]:
    for _ in range(WARM_UP):
        once()
    seconds: list[float] = []
    while len(seconds) < FEWEST or sum(seconds) < BUDGET_SECONDS:
        seconds.append(once())
    return seconds


def _undisturbed(seconds: list[float]) -> float:
    """Returns the first decile."""
    return sorted(seconds)[len(seconds) // 10]


def _requests(rows: EncodedRows, batch: int) -> list[FeatureBatch]:
    """Yields requests one after another in the order of the rows, and from the first again."""
    count = rows.rows
    return [
        feature_batch(rows.take((np.arange(batch) + start * batch) % count))
        for start in range(min(REQUESTS, -(-count // batch)))
    ]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
