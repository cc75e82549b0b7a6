"""Scores a split with a model: probabilities for all its rows, and their metrics."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from trials.data.cache import PreparedLog, Split
from trials.data.loader import eval_batches
from trials.data.weights import example_weights
from trials.metrics import evaluate_predictions, undo_negative_sampling
from trials.record import Metrics

EVAL_BATCH = 8192
"""Rows a forward pass without gradients; large enough that a pass's fixed costs vanish."""


@torch.no_grad()
def predict_split(model: nn.Module, split: Split) -> NDArray[np.float64]:
    """Click probabilities (N) of all rows in order, as the training log has them (not corrected).

    The model computes in the precision that its dense part has (`trials.master_weights.compute_in`).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    batches = eval_batches(split, batch_size=EVAL_BATCH)
    logits = [model(batch.to(device).features).float() for batch in batches]
    model.train(was_training)
    return torch.sigmoid(torch.cat(logits).double()).cpu().numpy()


def evaluate(model: nn.Module, log: PreparedLog, split_name: str) -> Metrics:
    """Metrics on a split of the log, corrected for negative sampling where its schema states a rate."""
    split = log.split(split_name)
    rate = log.schema.negative_sampling_rate
    p = undo_negative_sampling(predict_split(model, split), rate)
    label = np.asarray(split.labels, dtype=np.float64)
    return evaluate_predictions(p, label, example_weights(split, rate))
