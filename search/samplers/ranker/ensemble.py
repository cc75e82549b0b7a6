"""An ensemble of rankers: scores with a Gaussian process prior, learned from pairs of candidates.

Each member gives a candidate a score s; that i ends below j has the probability sigmoid(s_i - s_j) (RankNet,
Burges et al., ICML 2005, equation 3), and scores of like candidates are alike (preference learning with
Gaussian processes, Chu and Ghahramani, ICML 2005). Members differ in how fast likeness fades, in which
features count and in the candidates they learn from; members that rank held-out candidates best are taken.
Small networks in place of the kernel ranked worse and took longer (docs/log.md).

Shapes: N candidates, F features, K candidates that a member learns from, T others that test it, pairs of L and
R candidates each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trials.records.trial_record import Outcome, TrialRecord

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
    """Weight of the pair; 0 if the trainings say nothing about it."""


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
    """Mean cross-entropy over the pairs of a candidate held out, of which some are drawn if there are many, and
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
    tried = []
    learned = min(round(LEARNED_SHARE * len(x_NF)), MOST_LEARNED)
    for _ in range(TRIED):
        order = rng.permutation(len(x_NF))
        rows, held_out = np.sort(order[:learned]), np.sort(order[learned:])
        tests = np.sort(order[learned : learned + MOST_TESTED])
        kernel = Kernel.drawn(x_NF.shape[1], rng)
        k_KK = kernel(x_NF[rows], x_NF[rows])
        dual_K = _most_likely(k_KK, pairs(rows, rows))
        ahead_TK = (kernel(x_NF[tests], x_NF[rows]) @ dual_K)[:, None] - k_KK @ dual_K
        tested = pairs(tests, rows)
        cross_entropy_TK = np.logaddexp(0.0, ahead_TK) - _sigmoid(tested.logit_LR) * ahead_TK
        loss = float((tested.weight_LR * cross_entropy_TK).sum() / max(tested.weight_LR.sum(), 1e-12))
        tried.append(Ranker(kernel, x_NF[rows], dual_K, held_out, loss))
    return sorted(tried, key=lambda ranker: ranker.loss)[:MEMBERS]


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


def _sigmoid(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = 0.5 * x
    np.tanh(y, out=y)  # in place: new arrays of 256 x 256, hundreds for a proposal, take twice as long
    y += 1.0
    y *= 0.5
    return y


def _log_uniform(bounds: tuple[float, float], rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(*np.log(bounds))))


# Curves side by side: who was ahead at the latest number of examples that both of two candidates have seen.
#
# A candidate that was stopped, or still trains, is compared by what it showed; how much that says about the end
# is taken from candidates that went on to it (the regression of their last NE on what they had shown by then).
#
# Shapes: N candidates, G numbers of examples and the end, pairs of L and R candidates.

FEWEST_FINISHED = 6
"""Number of finished candidates from which on the regression is believed; before, differences count as they are:
an assumption, not measured apart."""
CURVE_SLOPES = (0.0, 2.0)
"""Bounds of the share of an early difference in NE is left at the end: an assumption, not measured apart."""


def final_ne(record: TrialRecord) -> float | None:
    """NE at the end of a training; infinite if it diverged, None if it has not ended so far."""
    if record.result.outcome is Outcome.DIVERGED:
        return math.inf
    if record.result.outcome is not Outcome.COMPLETED or record.result.validation is None:
        return None
    return None if math.isnan(record.result.validation.ne) else record.result.validation.ne


def has_shown(record: TrialRecord) -> bool:
    """Whether the record has an NE, at its end or on its curve so far, to compare it by."""
    if record.result.outcome in (Outcome.STOPPED, Outcome.RUNNING, Outcome.INTERRUPTED):
        return not all(map(math.isnan, record.result.curve.ne))
    return final_ne(record) is not None


class PairComparisons:
    """What the trainings say about pairs of candidates that have shown something; pairs are made as they are asked
    for, since all pairs of thousands of candidates fill gigabytes."""

    def __init__(self, records: Sequence[TrialRecord], temperature: float) -> None:
        """A comparison in which at this difference in NE the odds are e to 1.

        At least one candidate has an NE; candidates that diverged are as bad as the worst of those with an NE.
        """
        self._temperature = temperature
        examples = sorted({seen for record in records for seen in record.result.curve.examples})
        ne_NG = np.stack([_best_so_far(record, examples) for record in records])
        self._last_N = ne_NG.shape[1] - 1 - np.argmax(~np.isnan(ne_NG[:, ::-1]), axis=1)
        fits = [_regression(ne_NG[:, column], ne_NG[:, -1]) for column in range(ne_NG.shape[1])]
        self._slope_G, error_G = np.array(fits).T
        self._weight_G = temperature**2 / (temperature**2 + 2.0 * error_G**2)
        self._ne_NG = np.where(np.isinf(ne_NG), ne_NG[np.isfinite(ne_NG)].max(), ne_NG)

    def among(self, left: np.ndarray, right: np.ndarray) -> Pairs:
        """The pairs of these candidates, by their rows."""
        common_LR = np.minimum(self._last_N[left][:, None], self._last_N[right])
        logit_LR = self._ne_at(right, common_LR) - self._ne_at(left[:, None], common_LR)
        logit_LR *= self._slope_G.take(common_LR)
        logit_LR /= self._temperature
        weight_LR = self._weight_G.take(common_LR)
        # no pair is made of a candidate and itself, or if one has no evaluation at a length that both have reached
        silent_LR = np.isnan(logit_LR) | (left[:, None] == right)
        logit_LR[silent_LR] = weight_LR[silent_LR] = 0.0
        return Pairs(logit_LR, weight_LR)

    def _ne_at(self, rows: np.ndarray, columns_LR: np.ndarray) -> np.ndarray:
        """NE of candidates at numbers of examples, by one index each: a gather by two takes twice as long."""
        ne_LR: np.ndarray = self._ne_NG.take(rows * self._ne_NG.shape[1] + columns_LR)
        return ne_LR


def _best_so_far(record: TrialRecord, examples: Sequence[int]) -> np.ndarray:
    """Lowest NE up to each number of examples, then NE at the end; NaN for what the candidate has not reached."""
    row, best = np.full(len(examples) + 1, math.nan), math.inf
    points = dict(zip(record.result.curve.examples, record.result.curve.ne, strict=True))
    final = final_ne(record)
    last = max(points, default=0)
    for column, seen in enumerate(examples):
        ne = points.get(seen, math.nan)
        best = best if math.isnan(ne) else min(best, ne)
        if seen <= last and math.isfinite(best):
            row[column] = best
    if final is not None:
        row[len(examples)] = final
        row[[seen > last for seen in examples] + [False]] = final
    return row


def _regression(early: np.ndarray, final: np.ndarray) -> tuple[float, float]:
    """Slope (within `SLOPES`) and standard error of the last NE, given an early one."""
    both = np.isfinite(early) & np.isfinite(final)
    x, y = early[both], final[both]
    if len(x) < FEWEST_FINISHED or x.std() == 0:
        return 1.0, 0.0
    slope = float(np.clip(np.cov(x, y, bias=True)[0, 1] / x.var(), *CURVE_SLOPES))
    rest = y - y.mean() - slope * (x - x.mean())
    return slope, float(np.sqrt((rest**2).sum() / max(len(x) - 2, 1)))


# Scores read as NE: what is expected of candidates, and how sure that is.
#
# A member's score of a candidate that it did not learn from is an honest prediction; the line from such scores
# to NE gives every score an NE. The error of that NE is what the members expect, which grows with the distance
# from known candidates, and their disagreement, both times the factor that held-out candidates show to be
# missing.
#
# Shapes: N candidates, F features, R records (the first of the candidates), E members of the ensemble.

TEMPERATURE = 0.5
"""Difference in NE, over that of the median and the best, at which the odds of a pair are e to 1. Chosen on the
made-up function of benchmarks/search/samplers_on_surrogate.py (docs/log.md, 2026-11-21, 2 cores): with a tenth of
NE's spread expectations were off by 0.005 on average, with half of it mostly by less than 0.002, in one repeat."""
TAIL = 2.0
"""NE counts up to so many times the difference of median and best above the median, so that a bad candidate says
that it is bad and not how bad: an assumption, not measured apart."""
SLOPES = (0.5, 1.5)
"""Bounds of the line's slope, over the temperature, since few candidates do not show it well: an assumption, not
measured apart."""
ERROR_SCALES = (0.3, 3.0)
"""Bounds of the error that held-out candidates show over the error that the members expect: an assumption, not
measured apart."""
SMALLEST_SPREAD = 1e-9
"""Smallest difference of the median from the best in NE, for candidates that are all alike: an assumption, far
below any noise."""


def predict_ne(
    x_NF: np.ndarray, records: Sequence[TrialRecord], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """NE that is expected for all rows, and its standard error, by rankers that learned from `records`; the first
    rows are those records' candidates."""
    final_R = np.array([np.nan if (ne := final_ne(record)) is None else ne for record in records])
    ne_R = np.minimum(final_R, np.median(final_R[np.isfinite(final_R)]) + TAIL * _spread(final_R))
    temperature = TEMPERATURE * _spread(ne_R)
    rankers = train(x_NF[: len(records)], PairComparisons(records, temperature).among, rng)
    score_EN = np.stack([ranker.scores(x_NF) for ranker in rankers])
    variance_EN = np.stack([ranker.variances(x_NF) for ranker in rankers]) + score_EN.var(axis=0)
    held_out_ER = np.zeros((len(rankers), len(records)), dtype=bool)
    for row, ranker in zip(held_out_ER, rankers, strict=True):
        row[ranker.held_out] = True
    score_R = _mean_of(score_EN[:, : len(records)], held_out_ER)
    variance_R = _mean_of(variance_EN[:, : len(records)], held_out_ER)
    # the line NE = level + slope * score, by scores of candidates that the members did not learn from
    both = np.isfinite(score_R) & np.isfinite(ne_R)
    x, y = score_R[both], ne_R[both]
    steepness = -float(np.cov(x, y, bias=True)[0, 1]) / (float(x.var()) or 1.0) / temperature
    slope = -temperature * float(np.clip(steepness, *SLOPES))
    level = float(y.mean() - slope * x.mean())
    # the errors are so many times those that the members expect
    off = (y - level - slope * x) ** 2 / (slope**2 * np.maximum(variance_R[both], 1e-12))
    error_scale = float(np.clip(np.sqrt(off.mean()), *ERROR_SCALES))
    error_N = np.sqrt(variance_EN.mean(axis=0)) * error_scale * -slope
    return level + slope * score_EN.mean(axis=0), error_N


def _spread(ne_R: np.ndarray) -> float:
    finite = ne_R[np.isfinite(ne_R)]
    return max(float(np.median(finite) - finite.min()), SMALLEST_SPREAD)


def _mean_of(value_ER: np.ndarray, held_out_ER: np.ndarray) -> np.ndarray:
    """Mean over the members that a candidate was kept from; NaN if there is no such member."""
    count_R = held_out_ER.sum(axis=0)
    total_R = (value_ER * held_out_ER).sum(axis=0)
    return np.where(count_R > 0, total_R / np.maximum(count_R, 1), np.nan)
