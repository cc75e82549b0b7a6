"""An ensemble of rankers: scores with a Gaussian process prior, learned from pairs of candidates.

Each member gives a candidate a score s; that i ends below j has the probability sigmoid(s_i - s_j) (RankNet,
Burges et al., ICML 2005, equation 3), and scores of like candidates are alike (preference learning with Gaussian
processes, Chu and Ghahramani, ICML 2005). Members differ in how fast likeness fades, in which features count and
in the candidates they learn from; members that rank held-out candidates best are taken. Small networks in
place of the kernel ranked worse and took longer (docs/log.md).

Shapes: N candidates, F features, K candidates that a member learns from, T others that test it, pairs of L and R
candidates each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

TRIED = 40
"""Number of rankers that are trained for a proposal: an assumption, not measured apart."""
MEMBERS = 8
"""Number of rankers that are kept, the best of those trained: an assumption, not measured apart."""
LEARNED_SHARE = 0.85
"""Share of the candidates that a member learns from, the others test it: an assumption, not measured apart."""
MOST_LEARNED = 256
"""Largest number of candidates that a member learns from, for the time of a proposal grows with its cube: an
assumption, not measured apart."""
MOST_TESTED = 256
"""Largest number of other candidates that test a member, so that a proposal takes no longer the more are known: an
assumption, not measured apart."""
ITERATIONS = 10
"""Number of Newton's steps to the scores of highest posterior probability: an assumption, not measured apart."""
LENGTHS = (2.0, 20.0)
"""Distance, in standardised features, over which likeness fades, smallest and largest: an assumption, not measured
apart."""
AMPLITUDES = (1.0, 5.0)
"""Standard deviation of scores, smallest and largest: an assumption, not measured apart."""
LINEAR = (0.001, 0.3)
"""Part of a standardised feature that is linear, over the amplitude, smallest and largest: an assumption, not
measured apart."""
OBSERVATIONS = 25.0
"""Twice the weight of a candidate's pairs with all others together: at a temperature of half the spread of NE, a
training then counts as exact to a seventh of that spread. Chosen on the made-up function (docs/log.md,
2026-11-21): with it and that temperature the bias of expected NE was mostly below 0.002, in one repeat."""
NOISE = 2.0 / OBSERVATIONS
"""Variance of what one training says about a score: it follows from `OBSERVATIONS` by definition, the curvature of
a pair being a quarter at most."""
RELEVANCE = 0.5
"""Spread of the logarithms of how much single features count, at most. Measured on the made-up function
(docs/log.md, 2026-11-21): a spread of 1.0 cost up to 0.1 of Kendall's tau, so little or none is better; 0.5 itself
is an assumption."""


@dataclass(frozen=True)
class Pairs:
    """What the trainings say about the pairs of one of L candidates and one of R."""

    logit_LR: np.ndarray
    """Logit of the probability that the row's candidate ends below the column's."""
    weight_LR: np.ndarray
    """Weight of the pair; 0 where the trainings say nothing about it."""


PairsAmong = Callable[[np.ndarray, np.ndarray], Pairs]
"""A function that returns the pairs of candidates, by their rows: those of the first with those of the second."""


@dataclass(frozen=True)
class Kernel:
    """How alike two candidates are: a squared exponential and a linear part, of scaled features."""

    scale_F: np.ndarray
    amplitude: float
    linear: float

    @classmethod
    def drawn(cls, features: int, rng: np.random.Generator) -> Kernel:
        """A kernel with random lengths, amplitude and relevance of features."""
        relevance_F = np.exp(rng.normal(0.0, rng.uniform(0.0, RELEVANCE), features))
        amplitude = _log_uniform(AMPLITUDES, rng)
        linear = amplitude * _log_uniform(LINEAR, rng)
        return cls(relevance_F / _log_uniform(LENGTHS, rng), amplitude, linear)

    def prior_variance(self, x_NF: np.ndarray) -> np.ndarray:
        """Variance of each candidate's score before any training is known."""
        variance_N: np.ndarray = self.amplitude**2 + self.linear**2 * ((x_NF * self.scale_F) ** 2).sum(axis=1)
        return variance_N

    def __call__(self, x_NF: np.ndarray, y_KF: np.ndarray) -> np.ndarray:
        """The kernel k_NK: how alike each of N candidates is to each of K."""
        x_NF, y_KF = x_NF * self.scale_F, y_KF * self.scale_F
        inner_NK = x_NF @ y_KF.T
        squared_NK = (x_NF**2).sum(axis=1)[:, None] + (y_KF**2).sum(axis=1) - 2.0 * inner_NK
        likeness_NK = np.exp(-0.5 * np.maximum(squared_NK, 0.0))
        k_NK: np.ndarray = self.amplitude**2 * likeness_NK + self.linear**2 * inner_NK
        return k_NK


@dataclass(frozen=True)
class Ranker:
    """One member of the ensemble, trained."""

    kernel: Kernel
    x_KF: np.ndarray
    """Features of the candidates that the ranker learned from."""
    dual_K: np.ndarray
    """Weights of the kernel's columns in a score."""
    held_out: np.ndarray
    """Rows of the candidates that the ranker did not learn from."""
    loss: float
    """Mean cross-entropy over the pairs of a candidate held out, of which some are drawn where there are many, and
    one that was learned from."""

    def scores(self, x_NF: np.ndarray) -> np.ndarray:
        """The scores s_N; the higher a score, the lower the NE."""
        score_N: np.ndarray = self.kernel(x_NF, self.x_KF) @ self.dual_K
        return score_N

    def variances(self, x_NF: np.ndarray) -> np.ndarray:
        """Variances of the scores, as of a Gaussian process that has seen scores with the noise that the pairs
        leave."""
        k_KK = self.kernel(self.x_KF, self.x_KF)
        k_NK = self.kernel(x_NF, self.x_KF)
        weight_KN = np.linalg.solve(k_KK + NOISE * np.eye(len(k_KK)), k_NK.T)
        variance_N = self.kernel.prior_variance(x_NF) - (k_NK * weight_KN.T).sum(axis=1)
        # rounding may leave a candidate that was learned from slightly below zero
        bounded_N: np.ndarray = np.maximum(variance_N, 0.0)
        return bounded_N


def train(x_NF: np.ndarray, pairs: PairsAmong, rng: np.random.Generator) -> list[Ranker]:
    """The members of the ensemble for these candidates, best first."""
    tried = [_ranker(x_NF, pairs, rng) for _ in range(TRIED)]
    return sorted(tried, key=lambda ranker: ranker.loss)[:MEMBERS]


def _ranker(x_NF: np.ndarray, pairs: PairsAmong, rng: np.random.Generator) -> Ranker:
    order = rng.permutation(len(x_NF))
    learned = min(round(LEARNED_SHARE * len(x_NF)), MOST_LEARNED)
    rows, held_out = np.sort(order[:learned]), np.sort(order[learned:])
    tests = np.sort(order[learned : learned + MOST_TESTED])
    kernel = Kernel.drawn(x_NF.shape[1], rng)
    k_KK = kernel(x_NF[rows], x_NF[rows])
    dual_K = _most_likely(k_KK, pairs(rows, rows))
    ahead_TK = (kernel(x_NF[tests], x_NF[rows]) @ dual_K)[:, None] - k_KK @ dual_K
    loss = _cross_entropy(ahead_TK, pairs(tests, rows))
    return Ranker(kernel, x_NF[rows], dual_K, held_out, loss)


def _most_likely(k_KK: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Weights dual_K of the scores of highest posterior probability, s = k dual.

    Newton's steps with the curvature's bound, a quarter for each pair (Boehning, 1992), in place of the
    curvature: one factorisation serves all steps, and no step makes the scores less likely. A candidate is in
    many pairs and was trained once, so what a pair weighs falls with their number.
    """
    candidates = len(k_KK)
    weight_KK = pairs.weight_LR * (2.0 * OBSERVATIONS / candidates)
    bound_KK = np.diag(weight_KK.sum(axis=1) / 4.0) - weight_KK / 4.0
    solve_KK = np.linalg.inv(np.eye(candidates) + bound_KK @ k_KK)
    probability_KK = _sigmoid(pairs.logit_LR)
    score_K, dual_K = np.zeros(candidates), np.zeros(candidates)
    for _ in range(ITERATIONS):
        error_KK = weight_KK * (_sigmoid(score_K[:, None] - score_K) - probability_KK)
        dual_K = solve_KK @ (bound_KK @ score_K - error_KK.sum(axis=1))
        score_K = k_KK @ dual_K
    return dual_K


def _cross_entropy(ahead_LR: np.ndarray, pairs: Pairs) -> float:
    loss_LR = np.logaddexp(0.0, ahead_LR) - _sigmoid(pairs.logit_LR) * ahead_LR
    return float((pairs.weight_LR * loss_LR).sum() / max(pairs.weight_LR.sum(), 1e-12))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = 0.5 * x
    np.tanh(y, out=y)  # in place: new arrays of 256 x 256, hundreds for a proposal, take twice as long
    y += 1.0
    y *= 0.5
    return y


def _log_uniform(bounds: tuple[float, float], rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(*np.log(bounds))))
