"""Relative differences of NE with intervals: seeds and blocks of examples resampled together, paired.

Both models are scored on the same rows and trained from the same seeds, so that NE's denominator, the entropy
of the base rate, cancels in the relative difference, and sums of the examples' weighted losses by seed and
block hold all there is to know: S x K numbers, however long the log.

Seeds and blocks are crossed factors. Resampling both independently (the pigeonhole bootstrap, Owen, arXiv
0712.1111) is right or slightly too wide whatever dependence there is within a seed or a block. Of S seeds S - 1
are drawn each time, and of K blocks K - 1 (Rao and Wu, JASA 1988), without which five of either would make the
standard error a tenth too small; Student's t with Satterthwaite's degrees of freedom does the same for the tails.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtr, stdtrit

from dhen.values import Value
from trials.data.example_weights import Floats

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
    variances = (
        (float(percent_S.var(ddof=1)) / seeds, seeds - 1),
        (float(percent_RS.mean(axis=1).var(ddof=1)), blocks - 1),
    )
    return BootstrapDifference(
        percent=float(percent_S.mean()),
        standard_error=float(replicates_R.std(ddof=1)),
        degrees=_satterthwaite(variances),
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


def _satterthwaite(variances: Sequence[tuple[float, int]]) -> float:
    """Degrees of freedom of a sum of variances, each with its own degrees (Biometrics Bulletin 1946)."""
    total = sum(variance for variance, _ in variances)
    weighted = sum(variance**2 / degrees for variance, degrees in variances)
    return total**2 / weighted if weighted > 0.0 else float(min(degrees for _, degrees in variances))
