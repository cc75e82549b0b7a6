"""What choosing the lowest of several NE makes of it, from their losses by block of rows.

The lowest of N is partly luck: it was chosen on the rows that it is judged by. Blocks are drawn with replacement,
the lowest on those drawn is chosen, and what it comes to on the blocks that were not drawn, beside the lowest of
all there, is what choosing had promised too much (bootstrap bias correction, Tsamardinos, Greasidou and
Borboudakis, Machine Learning 2018, arXiv 1708.07180, there of rows). Where all are equally good the estimate is
unbiased; else it is rather too large, as a draw has 63 % of the blocks.

Shapes: C trials, K blocks, R draws.
"""

from __future__ import annotations

import numpy as np

from search.analysis.statistics.bootstrap import FIXED_SEED, RESAMPLES
from trials.data.example_weights import Floats


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
