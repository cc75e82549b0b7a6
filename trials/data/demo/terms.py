"""Which effects the teacher multiplies, and how much each product weighs.

Interactions form chains of four columns of modest cardinality: a product of four comes with the products
of its first two and first three columns and with effects of each column alone (strong heredity, as
interactions found in experiments tend to have). So high orders can be learnt, though not by one level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from trials.data.demo.columns import CATEGORICAL, COUNTER, COUNTS, HEAD, MULTI_HOT
from trials.data.demo.effects import HOUR, TRAITS, Name
from trials.data.demo.spec import DemoLog
from trials.data.demo.visits import AFFINITY, OWN, populations

CHAINS = 3
DOT_PRODUCTS = 4
"""Pairs of categorical columns, of any cardinality, that interact through the dot product of their traits."""
NUMBER_BY_ID = 3
"""Pairs of a numeric and a categorical column."""
_MODEST = tuple(column.name for column in CATEGORICAL if 8 <= column.cardinality <= HEAD)
"""Columns of which all ids are frequent enough to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The product of one to four effects, each standardised, times a weight."""

    order: str
    """Order of interaction, a field of `Shares`, or `own` or `affinity`."""
    effects: tuple[Name, ...]
    weight: float = 1.0
    """Weight in a sum of uncorrelated products: its square is a variance."""


def draw_terms(rng: Generator, spec: DemoLog) -> tuple[Term, ...]:
    """Returns all terms, their weights such that every order has its share of the logit's variance."""
    modest = [str(name) for name in rng.permutation(_MODEST)]
    chains = [modest[4 * i : 4 * i + 4] for i in range(CHAINS)]
    terms = [
        *_chain_terms(chains),
        *_other_pairs(rng),
        *_single_effects(rng, {c for chain in chains for c in chain}),
    ]
    terms += [Term(order="drift", effects=((HOUR, 0),)), Term(order="drift", effects=((COUNTER, 0),))]
    terms += _visit_terms(spec)
    variance = dict.fromkeys((term.order for term in terms), 0.0)
    for term in terms:
        variance[term.order] += term.weight**2
    rest = 1 - spec.own - spec.affinity
    share = {order: rest * part for order, part in spec.shares.to_dict().items()}
    share |= {OWN: spec.own, AFFINITY: spec.affinity}
    scale = {order: spec.logit_deviation * np.sqrt(share[order] / variance[order]) for order in variance}
    return tuple(replace(term, weight=float(term.weight * scale[term.order])) for term in terms)


def _chain_terms(chains: list[list[str]]) -> Iterator[Term]:
    """Yields products of the first two, first three and all four columns of a chain, and of its last two."""
    for chain in chains:
        for order, columns in (
            ("second", chain[:2]),
            ("second", chain[2:]),
            ("third", chain[:3]),
            ("fourth", chain),
        ):
            yield Term(order=order, effects=tuple((column, 0) for column in columns))


def _other_pairs(rng: Generator) -> Iterator[Term]:
    """Yields dot products of two ids' traits, and products of ids with numbers and with bags."""
    for _ in range(DOT_PRODUCTS):
        first, second = rng.choice([column.name for column in CATEGORICAL], 2, replace=False)
        for trait in range(TRAITS):
            yield Term(
                order="second", effects=((str(first), trait), (str(second), trait)), weight=TRAITS**-0.5
            )
    numbers = rng.choice([column.name for column in COUNTS], NUMBER_BY_ID, replace=False)
    for name in (*numbers, *(column.name for column in MULTI_HOT)):
        yield Term(order="second", effects=((str(name), 0), (str(rng.choice(_MODEST)), 0)))


def _visit_terms(spec: DemoLog) -> Iterator[Term]:
    """Yields the effects of users alone, of items alone, and of both together, where they have a share."""
    if spec.own:
        yield from (Term(order=OWN, effects=((population.name, 0),)) for population in populations(spec))
    if spec.affinity:
        yield Term(order=AFFINITY, effects=((AFFINITY, 0),))


def _single_effects(rng: Generator, in_chains: set[str]) -> Iterator[Term]:
    """Yields one effect per column, some much stronger than others; those of chains stronger by half."""
    names = [column.name for column in (*CATEGORICAL, *MULTI_HOT)] + [column.name for column in COUNTS]
    for name in names:
        weight = rng.gamma(2.0) * (1.5 if name in in_chains else 1.0)
        yield Term(order="first", effects=((name, 0),), weight=weight)
