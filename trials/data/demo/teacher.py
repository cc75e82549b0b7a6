"""The teacher of the demo log: the known probability from which every label is drawn.

Its logit is an intercept plus the weighted sum of `terms`, each a product of one to four `effects`
standardised to mean 0 and variance 1. Columns are independent, so products of different columns are
uncorrelated and a term's weight squared is its part of the logit's variance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trials.data.demo.effects import Effect, Name, draw_effects
from trials.data.demo.examples import Drift, Examples, Floats, draw_examples
from trials.data.demo.spec import DemoLog
from trials.data.demo.terms import Term, draw_terms
from trials.data.demo.visits import visit_effects, with_visits

_SAMPLE = 1 << 17
"""Number of examples on which effects are standardised and the intercept is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardEffect:
    """An effect less its mean, over its standard deviation."""

    effect: Effect
    mean: float
    deviation: float

    @classmethod
    def measure(cls, effect: Effect, examples: Examples) -> StandardEffect:
        """Takes the mean and the deviation from examples."""
        values_B = effect(examples)
        return cls(effect=effect, mean=float(values_B.mean()), deviation=float(values_B.std()))

    def __call__(self, examples: Examples) -> Floats:
        """Returns the standardised effect, shape [B]."""
        return (self.effect(examples) - self.mean) / self.deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A way that labels come about: how the base rate drifts, and what makes people click."""

    drift: Drift
    effects: dict[Name, StandardEffect]
    terms: tuple[Term, ...]
    intercept: float = 0.0

    @classmethod
    def draw(cls, spec: DemoLog) -> Teacher:
        """Draws the teacher of a seed, whatever the number of rows."""
        rng = np.random.default_rng([spec.seed, 0])
        drift, effects, terms = Drift.draw(rng), draw_effects(rng), draw_terms(rng, spec)
        effects |= visit_effects(spec)
        sample = _sample(spec, drift, stream=1)
        used = dict.fromkeys(name for term in terms for name in term.effects)
        standard = {name: StandardEffect.measure(effects[name], sample) for name in used}
        centred = cls(drift=drift, effects=standard, terms=terms)
        intercept = _intercept(centred.logit(sample), spec.base_rate)
        return cls(drift=drift, effects=standard, terms=terms, intercept=intercept)

    def by_order(self, examples: Examples) -> dict[str, Floats]:
        """Returns the parts of the logit, by order of interaction, [B] each; without the intercept."""
        values = {name: effect(examples) for name, effect in self.effects.items()}
        logits: dict[str, Floats] = {}
        for term in self.terms:
            product_B = term.weight * _product(values[name] for name in term.effects)
            logits[term.order] = logits.get(term.order, 0.0) + product_B
        return logits

    def logit(self, examples: Examples) -> Floats:
        """Returns the logit, shape [B]."""
        logit_B: Floats = self.intercept + np.sum(list(self.by_order(examples).values()), axis=0)
        return logit_B


def probability(logit_B: Floats) -> Floats:
    """Returns the logistic function of logits."""
    probability_B: Floats = 1.0 / (1.0 + np.exp(-logit_B))
    return probability_B


def variance_shares(spec: DemoLog) -> dict[str, float]:
    """Returns the realised shares of the logit's variance by order, measured on fresh examples; they add up to 1.

    An order's share is the covariance of its part with the whole logit, over the logit's variance.
    """
    teacher = Teacher.draw(spec)
    logits = teacher.by_order(_sample(spec, teacher.drift, stream=3))
    logit_B = np.sum(list(logits.values()), axis=0)
    return {
        order: float(np.cov(part_B, logit_B)[0, 1] / logit_B.var(ddof=1)) for order, part_B in logits.items()
    }


def _sample(spec: DemoLog, drift: Drift, *, stream: int) -> Examples:
    """Draws examples spread evenly over the ten days, none of the log itself."""
    position_B = (np.arange(_SAMPLE) + 0.5) / _SAMPLE
    examples = draw_examples(np.random.default_rng([spec.seed, stream]), drift, spec.base_rate, position_B)
    return with_visits(spec, examples, stream)


def _product(factors: Iterable[Floats]) -> Floats:
    product_B: Floats = np.prod(list(factors), axis=0)
    return product_B


def _intercept(logit_B: Floats, base_rate: float) -> float:
    """Returns the constant to add to logits so that their mean probability is the base rate (by bisection)."""
    low, high = -100.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if probability(logit_B + middle).mean() > base_rate else (middle, high)
    return low
