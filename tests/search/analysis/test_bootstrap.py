"""The paired bootstrap over seeds and blocks against truths that are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import stdtrit

from search.analysis.losses import losses
from search.analysis.statistics import BootstrapDifference, holm, paired_bootstrap
from trials.records.metrics import log_loss, undo_negative_sampling

Floats = NDArray[np.float64]


def sums(rng: np.random.Generator, percent: float, seeds: int, blocks: int) -> tuple[Floats, Floats]:
    """A model that is so many percent off its reference, with noise of seeds, of blocks, and of both together.

    What makes a block hard for one model makes it hard for the other.
    """
    hard_K = rng.uniform(0.5, 1.5, blocks)
    off_SK = percent + 0.1 * rng.standard_normal((seeds, 1)) + 1.0 * rng.standard_normal((1, blocks))
    off_SK = off_SK + 0.5 * rng.standard_normal((seeds, blocks))
    reference_SK = np.broadcast_to(hard_K, (seeds, blocks))
    return reference_SK * (1.0 + off_SK / 100.0), reference_SK


@pytest.mark.parametrize(
    ("seeds", "blocks", "least"), [(2, 100, 0.92), (5, 100, 0.92), (5, 5, 0.92), (5, 2, 0.86)]
)
def test_the_interval_covers_the_truth_as_often_as_it_says(seeds: int, blocks: int, least: float) -> None:
    """With two blocks nearly as often."""
    rng, truth, runs = np.random.default_rng(7), -0.3, 200
    intervals = [
        paired_bootstrap(*sums(rng, truth, seeds, blocks), resamples=200, seed=run).interval()
        for run in range(runs)
    ]
    covered = sum(low <= truth <= high for low, high in intervals) / runs
    assert least <= covered <= 0.985


def test_what_it_calls_detectable_it_finds_four_times_of_five() -> None:
    rng, runs = np.random.default_rng(8), 200
    none = [paired_bootstrap(*sums(rng, 0.0, 5, 100), resamples=200, seed=run) for run in range(runs)]
    least = float(np.median([estimate.detectable() for estimate in none]))
    found = [paired_bootstrap(*sums(rng, -least, 5, 100), resamples=200, seed=run) for run in range(runs)]
    assert 0.7 <= sum(estimate.p < 0.05 for estimate in found) / runs <= 0.92
    assert sum(estimate.p < 0.05 for estimate in none) / runs <= 0.08


def test_pairs_tell_more_than_two_samples_apart() -> None:
    """Blocks differ far more from each other than models do; pairs do not see that."""
    own, reference = sums(np.random.default_rng(9), -0.3, 5, 100)
    apart = np.random.default_rng(10).permuted(reference, axis=1)
    paired, unpaired = paired_bootstrap(own, reference), paired_bootstrap(own, apart)
    assert paired.standard_error < 0.2 * unpaired.standard_error
    equal = paired_bootstrap(own, own)
    assert (equal.percent, equal.standard_error, equal.p) == (0.0, 0.0, 1.0)
    assert equal.interval() == (0.0, 0.0)


def test_as_many_seeds_as_blocks_have_the_degrees_of_both() -> None:
    """Seeds and blocks that vary alike: of two of each two degrees, and not the one of either."""
    own_SK = 100.0 + np.array([[2.0, 0.0], [0.0, -2.0]])
    estimate = paired_bootstrap(own_SK, np.full((2, 2), 100.0))
    assert 1.5 < estimate.degrees <= 2.0


def test_interval_p_and_detectable_agree_with_students_t() -> None:
    estimate = BootstrapDifference(percent=-0.5, standard_error=0.2, degrees=4.0)
    assert estimate.interval() == pytest.approx((-0.5 - 2.7764 * 0.2, -0.5 + 2.7764 * 0.2), abs=1e-4)
    assert estimate.p == pytest.approx(0.0668, abs=1e-3)
    assert estimate.detectable() == pytest.approx((2.7764 + 0.9410) * 0.2, abs=1e-3)
    assert estimate.detectable(4) == pytest.approx((float(stdtrit(4, 1 - 0.05 / 8)) + 0.9410) * 0.2, abs=1e-3)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.5, 0.9]) == pytest.approx((1.0, 1.0))
    assert holm([0.04]) == (0.04,)


def test_losses_are_those_of_the_metrics() -> None:
    rng = np.random.default_rng(12)
    logit = rng.normal(0, 3, 500).astype(np.float32)
    label = (rng.random(500) < 0.3).astype(np.float32)
    for rate in (1.0, 0.1):
        p = undo_negative_sampling(1.0 / (1.0 + np.exp(-logit.astype(np.float64))), rate)
        wanted = log_loss(p, label.astype(np.float64), np.ones(500))
        assert losses(logit, label, rate).mean() == pytest.approx(wanted, rel=1e-9)
