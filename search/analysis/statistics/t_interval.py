"""Paired differences of NE over seeds: their mean, and Student's t-interval of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

from trials.analyses import MeanInterval
from trials.study_record import relative_ne_percent


def t_interval(values: Sequence[float], confidence: float) -> MeanInterval:
    """Mean of one or more values, with mean -+ t(n - 1) s / sqrt(n) where there are two or more."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return MeanInterval(mean=mean)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * statistics.stdev(values) / math.sqrt(n)
    return MeanInterval(mean=mean, low=mean - half, high=mean + half)


def compared(
    ne: Sequence[float | None], other: Sequence[float | None], confidence: float
) -> MeanInterval | None:
    """NE relative to another model's in percent, paired by seed; None where a seed of either has no NE."""
    pairs = [(a, b) for a, b in zip(ne, other, strict=True) if a is not None and b is not None]
    if len(pairs) < len(ne):
        return None
    return t_interval([relative_ne_percent(a, b) for a, b in pairs], confidence)
