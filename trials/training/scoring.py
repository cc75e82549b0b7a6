"""How long a forward pass of an exported model takes: a request of so many rows, evaluation mode, fp32.

Requests are of different validation rows in turn, so that tables are read in other places each time, after a
few that warm up. The time does not depend on what the weights are, so fresh ones do for a candidate that has
not been trained (a sparse mixture of experts sends rows elsewhere with other weights, as many to each expert
or not).

The clock. Candidates train side by side, and a request that waits for a core says nothing of the model. With
one thread on a CPU the whole pass runs in the calling thread, whose own CPU time (`time.thread_time`) leaves
out whatever others had the core for: on a core of its own that is the wall clock. With several threads, or on
an accelerator, nothing but the wall clock says how long a request takes; then no other training of the study
may run (`search.execution.admission.side_by_side`).

The quantile. What neighbours take of caches, and of a core whose second hardware thread they have, still slows
many requests down, so it is the fastest tenth that stands for one that is left alone. One network, measured
eight times on two cores while some twenty processes wanted them (2026-11-21): the median by the wall clock was
1.0 to 12 ms, the median of CPU time 0.98 to 1.52 ms, its first decile 0.72 to 0.82 ms.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dhen.inputs.growing import part_of_tables
from dhen.model import build_model
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device, machine_name
from trials.data.encoding import EncodedRows
from trials.data.loader import feature_batch
from trials.data.prepared_log import PreparedLog
from trials.optim.adamw import compute_in
from trials.records.job import Job
from trials.records.serving_limits import ForwardTime, ServingConfig
from trials.records.strategy import Ranks, Strategy
from trials.records.trial_record import Metrics
from trials.store.weights import load_weights, read_all, write_logits
from trials.training.distributed.engine import TABLES
from trials.training.distributed_step import DistributedStep
from trials.training.evaluation import Keep, evaluate
from trials.training.progressive import score_ahead
from trials.training.servers.client import Servers

# Scores trained weights on a split: as the model was trained, so that what fitted then fits now.
#
# If the job has a `period`, the weights go on learning from the split while they score it
# (`trials.training.progressive`); the file stays as it is.


def score(
    job: Job,
    weights: Path,
    log: PreparedLog,
    split: str,
    *,
    ranks: Ranks,
    strategy: Strategy,
    cluster: Cluster | None,
    evaluation_rows: int | None = None,
    servers: Servers | None = None,
    keep: Keep | None = None,
    goes_on: Callable[[], None] = lambda: None,
) -> Metrics:
    """Returns metrics on a split of the log, the same on all ranks; a collective if there are several.

    Args:
        job: the job, resolved.
        weights: the weights file, read by the first rank alone, as hosts need not share a disk.
        log: the job's log.
        split: train, validation or test.
        ranks: the ranks that score the split together.
        strategy: how the model is held.
        cluster: the cluster for which tables are placed.
        evaluation_rows: rows of a rank that are scored at once, by the plan.
        servers: those that hold the tables, with these weights; None if ranks do.
        keep: is given the logits of all rows, on the first rank.
        goes_on: is called after each step, if periods are trained on once they are scored.

    Raises:
        UserError: for weights that are missing, damaged, or of another model.
    """
    assert job.training.precision != "auto"
    if job.period is not None:
        return score_ahead(
            job,
            read_all(weights) if ranks.first else {},
            log,
            split,
            ranks=ranks,
            strategy=strategy,
            cluster=cluster,
            evaluation_rows=evaluation_rows,
            keep=keep,
            goes_on=goes_on,
        )
    with nullcontext() if servers is None else part_of_tables(None):
        model = build_model(job.model, job.features)
    if ranks.first:
        load_weights(model, weights, own=None if servers is None else TABLES)
    if ranks.world == 1 and servers is None:
        model = compute_in(model.to(device()), job.training.precision)
        return evaluate(model, log, split, evaluation_rows, keep)
    if ranks.world > 1:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
    step = DistributedStep(
        model, job, strategy, ranks, cluster, servers, where=device(), evaluation_rows=evaluation_rows
    )
    return step.evaluate(log, split, keep)


def keep_logits(path: Path) -> Keep:
    """Writes logits to their file, whole or not at all."""
    return lambda logit_N: write_logits(logit_N.cpu().numpy(), path)


REQUESTS = 8
"""Number of different requests at most, taken in turn."""
WARM_UP, FEWEST = 3, 7
"""Number of requests before the clock counts, and the least number that it counts."""
BUDGET_SECONDS = 0.2
"""Seconds of counted requests, if the least number takes less."""


def candidate_time(job: Job, log: PreparedLog, serving: ServingConfig) -> ForwardTime:
    """Returns the forward time of a job's model with fresh weights, on validation rows of its log."""
    return forward_time(build_model(job.model, job.features), log.split("validation").inputs, serving)


def forward_time(model: nn.Module, rows: EncodedRows, serving: ServingConfig) -> ForwardTime:
    """Returns the forward time of a model on these rows, which are repeated if they are fewer than a request
    has.

    The model is left in evaluation mode on the device that scores here.
    """
    where = device()
    model = model.to(where).eval()
    count = rows.rows
    places = np.arange(serving.batch)
    requests = cycle(
        [
            feature_batch(rows.take((places + start * serving.batch) % count)).to(where)
            for start in range(min(REQUESTS, -(-count // serving.batch)))
        ]
    )
    clock = time.perf_counter if where.type != "cpu" or serving.threads > 1 else time.thread_time

    def once() -> float:
        request = next(requests)
        began = clock()
        model(request)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return clock() - began

    with torch.inference_mode(), _threads(serving.threads):
        for _ in range(WARM_UP):
            once()
        seconds: list[float] = []
        while len(seconds) < FEWEST or sum(seconds) < BUDGET_SECONDS:
            seconds.append(once())
    first_decile = sorted(seconds)[len(seconds) // 10]
    return ForwardTime(
        ms=1000.0 * first_decile, batch=serving.batch, threads=serving.threads, machine=machine_name()
    )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
