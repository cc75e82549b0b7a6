"""Scores trained weights on a split: as the model was trained, so that what fitted then fits now.

Where the job has a `period`, the weights go on learning from the split while they score it
(`trials.training.progressive`); the file stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from dhen.inputs.fresh_rows import part_of_tables
from dhen.model import build_model
from trials.cluster.cluster import Cluster
from trials.cluster.machine import device
from trials.data.cache import PreparedLog
from trials.distributed.table_split import TABLES
from trials.job import Job
from trials.optim.master_weights import compute_in
from trials.ranks import Ranks
from trials.record import Metrics
from trials.servers.client import Servers
from trials.storage.logits_file import write_logits
from trials.storage.weights_file import load_weights, read_all
from trials.strategy import Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.evaluation import Keep, evaluate
from trials.training.progressive import score_ahead


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
    """Returns metrics on a split of the log, the same on all ranks; a collective where there are several.

    Args:
        job: the job, resolved.
        weights: the weights file, read by the first rank alone, as hosts need not share a disk.
        log: the job's log.
        split: train, validation or test.
        ranks: the ranks that score the split together.
        strategy: how the model is held.
        cluster: the cluster for which tables are placed.
        evaluation_rows: rows of a rank that are scored at once, by the plan.
        servers: those that hold the tables, with these weights; None where ranks do.
        keep: is given the logits of all rows, on the first rank.
        goes_on: is called after each step, where periods are trained on once they are scored.

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

    def keep(logit_N: Tensor) -> None:
        write_logits(logit_N.cpu().numpy(), path)

    return keep
