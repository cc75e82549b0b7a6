"""Scores a split with a model: probabilities for all its rows, and their metrics.

Over several ranks each scores its part of the rows; the scores meet on rank 0, which works the metrics out as
one process would, and tells them to all. Scores wait in the host's memory. A pass saves nothing for backward, and
takes as many rows as fit in what a training step holds (`CostModel.evaluation_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.errors import UserError
from dhen.tape import MOST_ROWS, rows_at_once
from trials.cluster.machine import device
from trials.data.loader import eval_batches
from trials.data.prepared_log import PreparedLog, Split
from trials.records.metrics import evaluate_predictions, example_weights, undo_negative_sampling
from trials.records.strategy import DataPart, Ranks, rank_slice
from trials.records.trial_record import Metrics
from trials.training.memory_limit import on_host
from trials.training.process_group import as_first, joined

Keep = Callable[[Tensor], None]
"""A function that is given the logits (N) of all rows in order, in the host's memory, fp32 and not corrected,
before metrics are made of them."""


def evaluate(
    model: nn.Module,
    log: PreparedLog,
    split_name: str,
    batch_size: int | None = None,
    keep: Keep | None = None,
) -> Metrics:
    """Returns metrics on a split of the log, corrected for negative sampling if its schema states a rate.

    `batch_size` rows go forward at a time, `rows_at_once` if not given. The model computes in the
    precision that its dense part has (`trials.optim.adamw.compute_in`).
    """
    split = log.split(split_name)
    with torch.no_grad():
        logit_N = split_logits(model, split, batch_size)
    return metrics_over_ranks(logit_N, split, log, Ranks(), keep)


def logit_metrics(logit_N: Tensor, split: Split, log: PreparedLog) -> Metrics:
    """Returns metrics of logits of all rows of a split of the log, not corrected for negative sampling so far."""
    rate, p = log.schema.negative_sampling_rate, torch.sigmoid(logit_N.double()).numpy()
    label = np.asarray(split.labels, dtype=np.float64)
    return evaluate_predictions(
        undo_negative_sampling(p, rate), label, example_weights(split.labels, split.weight, rate)
    )


def split_logits(model: nn.Module, split: Split, batch_size: int | None = None) -> Tensor:
    """Returns the logits (N) of all rows of a split, in fp32 in the host's memory, without gradients if the
    caller wants none; `batch_size` rows go forward at a time, `rows_at_once` if not given."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    batches = eval_batches(split, batch_size=batch_size or rows_at_once(model))
    logit_N = _on_host(model(batch.to(device).features) for batch in batches)
    model.train(was_training)
    return logit_N


def logits_over_ranks(
    score: Callable[[FeatureBatch], Tensor],
    split: Split,
    ranks: Ranks,
    batch_size: int = MOST_ROWS,
    data: DataPart | None = None,
) -> Tensor | None:
    """Returns the logits (N) of all rows of a split on the first rank, in the host's memory; None on others. A
    collective.

    Args:
        score: logit_B of examples on this process's device; every rank calls it equally often.
        split: the rows, the same on all ranks.
        ranks: the ranks, with a process group if there are several.
        batch_size: rows of a rank that go forward at a time, at most.
        data: which part of the rows this rank reads, if several ranks read the same; of these the first ones
            of all have the logits.

    Raises:
        UserError: on all ranks, if the split has fewer rows than there are ranks.
    """
    data = data or ranks.data_part()
    slices = [rank_slice(split.rows, rank, data.ranks) for rank in range(data.ranks)]
    sizes = [rows.stop - rows.start for rows in slices]
    if min(sizes) == 0:
        raise UserError(
            f"the {split.name} split has {split.rows} rows, fewer than one for each of {data.ranks} ranks; "
            "train on fewer ranks, or on a longer log."
        )
    # as many batches as any other rank: ranks may meet in each, and would wait for ever for one that has fewer
    passes = min(-(-max(sizes) // batch_size), min(sizes))
    at_once = max(batch_size, -(-max(sizes) // passes))
    batches = eval_batches(split, batch_size=at_once, passes=passes, rank=data.rank, ranks=data.ranks)
    where = device()
    mine = _on_host(score(batch.to(where).features) for batch in batches)
    with on_host():
        return joined(ranks, mine, sizes + [0] * (ranks.world - data.ranks))


def metrics_over_ranks(
    logit_N: Tensor | None, split: Split, log: PreparedLog, ranks: Ranks, keep: Keep | None = None
) -> Metrics:
    """Returns metrics of logits that the first rank has, equal on all ranks; a collective. `keep` is given the
    logits on the first."""
    with on_host():
        numbers = [0.0] * 4
        if logit_N is not None:
            if keep is not None:
                keep(logit_N)
            metrics = logit_metrics(logit_N, split, log)
            numbers = [metrics.ne, metrics.log_loss, metrics.auc, metrics.calibration]
        ne, log_loss, auc, calibration = as_first(ranks, numbers)
        return Metrics(ne=ne, log_loss=log_loss, auc=auc, calibration=calibration, examples=split.rows)


def _on_host(logits: Iterable[Tensor]) -> Tensor:
    """Returns logits of batches (B each) one after another, in fp32 in the host's memory: a device that trains has
    no room for those of a split."""
    found = []
    for logit_B in logits:
        with on_host():
            found.append(logit_B.to("cpu", torch.float32, copy=True))
        del logit_B  # before the next ones are made
    with on_host():
        return torch.cat(found)
