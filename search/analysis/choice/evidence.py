"""Losses of trials on validation by block of consecutive rows, in periods: what a choice rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from search.analysis.choice.judge import LEAST_BLOCKS, Evidence
from search.analysis.losses import Blocks, block_sums, blocks_of
from trials.data.cache import PreparedLog, Split
from trials.record import TrialRecord

PERIODS = 4
"""Number of periods that validation is divided into, in time: each is long enough to have an error of its own."""


def on_validation(
    trials: Sequence[TrialRecord],
    networks_of: Callable[[TrialRecord], Sequence[TrialRecord]],
    log: PreparedLog,
    logits: Callable[[TrialRecord], Path],
) -> Evidence | None:
    """The evidence of trials that have kept their logits on validation; None where it has too few rows for blocks.

    Args:
        trials: the baseline, then candidates and averages.
        networks_of: gives the networks of a trial.
        log: the study's log.
        logits: gives the file of a network's logits.
    """
    if log.manifest.rows["validation"] < LEAST_BLOCKS:
        return None
    return of_networks(trials, [[logits(network) for network in networks_of(trial)] for trial in trials], log)


def of_networks(
    trials: Sequence[TrialRecord], logits: Sequence[Sequence[Path]], log: PreparedLog
) -> Evidence:
    """The evidence of trials on a log's validation, from the files of the logits of each one's networks."""
    split = log.split("validation")
    blocks, rate = blocks_of(log, split), log.schema.negative_sampling_rate
    loss_CK = np.stack([block_sums(files, split, rate, blocks) for files in logits])
    return Evidence(trials=tuple(trials), loss_CK=loss_CK, period_K=_periods(blocks, split))


def _periods(blocks: Blocks, split: Split) -> NDArray[np.int64]:
    """The period that each block lies in; without time stamps there is one."""
    in_time = split.timestamp is not None and blocks.count >= PERIODS * LEAST_BLOCKS
    return np.arange(blocks.count) * (PERIODS if in_time else 1) // blocks.count
