"""Relative differences of NE with intervals: seeds and blocks of examples resampled together, paired.

Both models are scored on the same rows and trained from the same seeds, so that NE's denominator, the entropy
of the base rate, cancels in the relative difference, and sums of the examples' weighted losses by seed and
block hold all there is to know: S x K numbers, however long the log.

Seeds and blocks are crossed factors. Resampling both independently (the pigeonhole bootstrap, Owen, arXiv
0712.1111) is right or slightly too wide whatever dependence there is within a seed or a block. Of S seeds S -
1 are drawn each time, and of K blocks K - 1 (Rao and Wu, JASA 1988), without which five of either would make
the standard error a tenth too small; Student's t with Satterthwaite's degrees of freedom does the same for the
tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit
from scipy.stats import kendalltau

from dhen.values import Value
from trials.records.findings import MeanInterval
from trials.records.metrics import Floats
from trials.records.study_record import relative_ne_percent

RESAMPLES = 4000
"""Number of draws of seeds and blocks: the standard error of a standard error is 1.1 % of it with so many."""
CONFIDENCE = 0.95
"""Probability with which an interval covers the true difference."""
POWER = 0.8
"""Probability with which the smallest detectable difference is found."""
FIXED_SEED = 0
"""Seed of the resampling: the same losses give the same interval."""


class BootstrapDifference(Value):
    """A relative difference of NE in percent, with its standard error."""

    percent: float
    """Mean over seeds; negative is better than the reference."""
    standard_error: float
    degrees: float
    """Degrees of freedom of the standard error."""

    def interval(self) -> tuple[float, float]:
        """The two-sided 95 % interval."""
        half = float(stdtrit(self.degrees, 0.5 + CONFIDENCE / 2)) * self.standard_error
        return self.percent - half, self.percent + half

    @property
    def p(self) -> float:
        """The two-sided p-value of there being no difference."""
        if self.standard_error == 0.0:
            return 1.0 if self.percent == 0.0 else 0.0
        return min(1.0, 2.0 * float(stdtr(self.degrees, -abs(self.percent) / self.standard_error)))

    def detectable(self, comparisons: int = 1) -> float:
        """The smallest true difference that is found with 80 % power, at the level of Holm's first step."""
        level = (1.0 - CONFIDENCE) / comparisons
        quantiles = stdtrit(self.degrees, 1.0 - level / 2) + stdtrit(self.degrees, POWER)
        return float(quantiles) * self.standard_error


def paired_bootstrap(
    loss_SK: Floats, reference_SK: Floats, *, resamples: int = RESAMPLES, seed: int = FIXED_SEED
) -> BootstrapDifference:
    """The difference of NE from the reference's in percent, with its standard error.

    Args:
        loss_SK: sums of weighted losses, by seed (two at least) and block of examples (two at least).
        reference_SK: the same sums for the reference, trained from the same seeds and scored on the same rows.
        resamples: number of draws of seeds and blocks.
        seed: seed of the resampling.
    """
    seeds, blocks = loss_SK.shape
    assert loss_SK.shape == reference_SK.shape
    assert seeds > 1
    assert blocks > 1
    rng = np.random.default_rng(seed)
    percent_S = _percent(loss_SK.sum(axis=1), reference_SK.sum(axis=1))
    counts_RK = rng.multinomial(blocks - 1, np.full(blocks, 1.0 / blocks), size=resamples)
    percent_RS = _percent(counts_RK @ loss_SK.T, counts_RK @ reference_SK.T)
    drawn_seeds = rng.integers(seeds, size=(resamples, seeds - 1))
    replicates_R = np.take_along_axis(percent_RS, drawn_seeds, axis=1).mean(axis=1)
    # degrees of freedom of a sum of variances, each with its own (Satterthwaite, Biometrics Bulletin 1946)
    variances = (
        (float(percent_S.var(ddof=1)) / seeds, seeds - 1),
        (float(percent_RS.mean(axis=1).var(ddof=1)), blocks - 1),
    )
    total = sum(variance for variance, _ in variances)
    weighted = sum(variance**2 / degrees for variance, degrees in variances)
    degrees = total**2 / weighted if weighted > 0.0 else float(min(seeds, blocks) - 1)
    return BootstrapDifference(
        percent=float(percent_S.mean()),
        standard_error=float(replicates_R.std(ddof=1)),
        degrees=degrees,
    )


def one_seed_difference(loss_K: Floats, reference_K: Floats) -> BootstrapDifference:
    """The difference of NE from the reference's in percent, of networks that were trained once: over blocks alone.

    Args:
        loss_K: sums of weighted losses by block of examples (two at least).
        reference_K: the same sums for the reference, scored on the same rows.
    """
    difference_K, blocks = loss_K - reference_K, len(loss_K)
    return BootstrapDifference(
        percent=float(_percent(loss_K.sum(), reference_K.sum())),
        standard_error=float(100.0 * np.sqrt(blocks) * difference_K.std(ddof=1) / reference_K.sum()),
        degrees=float(blocks - 1),
    )


def holm(p: Sequence[float]) -> tuple[float, ...]:
    """Adjusted p-values (Holm 1979): however many are compared, one false finding at most in 20 studies."""
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = highest
    return tuple(adjusted)


def _percent(loss: Floats, reference: Floats) -> Floats:
    return 100.0 * (loss - reference) / reference


# How well two trainings of the same candidates rank them alike: Kendall's tau-b, its interval, the regret.
#
# Lower NE is better; a candidate that diverged has infinite NE. The interval is the percentile bootstrap over
# candidates, paired: what another draw of as many candidates from the space could have given.
#
# Shapes: N candidates, R resamples.

TAU_RESAMPLES = 2000
LEAST = 3
"""Number of candidates below which a tau is not shown: for two it is 1 or -1."""
Ne = Sequence[float] | NDArray[np.float64]
"""NE by candidate."""


class RankCorrelation(Value):
    """Kendall's tau-b, and its interval with the confidence asked for."""

    value: float
    low: float
    high: float


def tau_b(ne: Ne, reference: Ne) -> float | None:
    """Kendall's tau-b; None if it is not defined: too few candidates, or all equal."""
    if len(ne) < LEAST:
        return None
    tau = float(kendalltau(ne, reference, method="asymptotic").statistic)
    return None if math.isnan(tau) else tau


def tau_interval(ne: Ne, reference: Ne, confidence: float, seed: int) -> RankCorrelation | None:
    """Tau-b with its interval; equal seeds give equal intervals."""
    value = tau_b(ne, reference)
    if value is None:
        return None
    count = len(ne)
    draws = np.random.default_rng(seed).integers(count, size=(TAU_RESAMPLES, count))
    times_RN = np.stack([np.bincount(rows, minlength=count) for rows in draws]).astype(np.float64)
    x_NN, y_NN = _order(ne), _order(reference)

    def over_pairs(each_NN: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all pairs of candidates of each resample."""
        of_each_R: NDArray[np.float64] = ((times_RN @ each_NN) * times_RN).sum(axis=1)
        return of_each_R

    with np.errstate(invalid="ignore"):
        tau_R = over_pairs(x_NN * y_NN) / np.sqrt(over_pairs(np.abs(x_NN)) * over_pairs(np.abs(y_NN)))
    taus = tau_R[~np.isnan(tau_R)]
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(taus, (tail, 1.0 - tail))
    return RankCorrelation(value=value, low=float(low), high=float(high))


def _order(ne: Ne) -> NDArray[np.float64]:
    """1, 0 or -1 for each pair of candidates: which of them is better."""
    ne_N = np.asarray(ne)
    return (ne_N[:, None] > ne_N).astype(np.float64) - (ne_N[:, None] < ne_N)


def tau_of_best(ne: Ne, reference: Ne, share: float) -> float | None:
    """Tau-b among this share of the candidates, the best by the reference, which a front is made of."""
    count = math.ceil(share * len(reference))
    best = np.argsort(reference, kind="stable")[:count]
    return tau_b(np.asarray(ne)[best], np.asarray(reference)[best])


def regret_percent(ne: Ne, reference: Ne) -> float | None:
    """Excess of the reference NE of the best by `ne` over the lowest, in percent; None if that one diverged."""
    chosen, best = reference[int(np.argmin(ne))], min(reference)
    return 100.0 * (chosen - best) / best if math.isfinite(chosen) else None


# What choosing the lowest of several NE makes of it, from their losses by block of rows.
#
# The lowest of N is partly luck: it was chosen on the rows that it is judged by. Blocks are drawn with
# replacement, the lowest on those drawn is chosen, and what it comes to on the blocks that were not drawn,
# beside the lowest of all there, is what choosing had promised too much (bootstrap bias correction, Tsamardinos,
# Greasidou and Borboudakis, Machine Learning 2018, arXiv 1708.07180, there of rows). If all are equally good
# the estimate is unbiased; else it is rather too large, as a draw has 63 % of the blocks.
#
# Shapes: C trials, K blocks, R draws.


def relative_percent(loss_CK: Floats, reference_K: Floats) -> Floats:
    """NE of each trial relative to a reference's on the same rows, in percent (C)."""
    relative: Floats = 100.0 * (loss_CK.sum(axis=1) / reference_K.sum() - 1.0)
    return relative


def standard_errors(loss_CK: Floats, reference_K: Floats) -> Floats:
    """Standard errors of `relative_percent` over blocks (C), those of a ratio (Cochran 1977, section 2.11)."""
    blocks, total = loss_CK.shape[1], reference_K.sum()
    ratio_C = loss_CK.sum(axis=1) / total
    residual_CK = loss_CK - ratio_C[:, None] * reference_K
    errors: Floats = 100.0 * np.sqrt(blocks * residual_CK.var(axis=1, ddof=1)) / total
    return errors


def optimism_percent(loss_CK: Floats, *, resamples: int = RESAMPLES, seed: int = FIXED_SEED) -> float:
    """By how much the lowest NE of all trials is too low for having been chosen, in percent of it; 0 at least.

    Args:
        loss_CK: sums of weighted losses by trial and block of rows (two at least).
        resamples: number of draws of blocks.
        seed: seed of the draws.
    """
    trials, blocks = loss_CK.shape
    if trials < 2:
        return 0.0
    counts_RK = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples)
    left_out_RK = counts_RK == 0
    some_R = left_out_RK.any(axis=1)
    drawn_RC = counts_RK[some_R] @ loss_CK.T
    others_RC = left_out_RK[some_R] @ loss_CK.T
    chosen_R, lowest = drawn_RC.argmin(axis=1), int(loss_CK.sum(axis=1).argmin())
    promised_R = np.take_along_axis(others_RC, chosen_R[:, None], axis=1)[:, 0] / others_RC[:, lowest] - 1.0
    return max(0.0, 100.0 * float(promised_R.mean()))


# Paired differences of NE over seeds: their mean, and Student's t-interval of it.


def t_interval(values: Sequence[float], confidence: float) -> MeanInterval:
    """Mean of one or more values, with mean -+ t(n - 1) s / sqrt(n) if there are two or more."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return MeanInterval(mean=mean)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * statistics.stdev(values) / math.sqrt(n)
    return MeanInterval(mean=mean, low=mean - half, high=mean + half)


def compared(
    ne: Sequence[float | None], other: Sequence[float | None], confidence: float
) -> MeanInterval | None:
    """NE relative to another model's in percent, paired by seed; None if a seed of either has no NE."""
    pairs = [(a, b) for a, b in zip(ne, other, strict=True) if a is not None and b is not None]
    if len(pairs) < len(ne):
        return None
    return t_interval([relative_ne_percent(a, b) for a, b in pairs], confidence)
