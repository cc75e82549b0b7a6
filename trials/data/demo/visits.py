"""Users and items of the demo log: ids that recur, may come and go, and have effects alone and together.

There is a fixed number of places, each with its frequency. Who has a place keeps it for a lifetime, and then
somebody new comes; places change hands at different times. Effects of users and items may turn with time into
others. Nothing here moves the rest of the log: its random numbers are drawn from streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trials.data.demo.columns import IdColumn
from trials.data.demo.effects import Effect, Name
from trials.data.demo.examples import Examples, Floats, Ints, draw_ranks
from trials.data.demo.spec import DAYS, DemoLog

USER, ITEM = "user", "item"
OWN, AFFINITY = "own", "affinity"
_SECONDS_PER_DAY = 86_400
_DRAWS, _OWN, _VECTORS = 4, 5, 6
"""Streams of random numbers: who comes in each row, effects of ids alone, vectors of ids."""
_GOLDEN = 0.6180339887498949
"""Its multiples, less their whole parts, spread evenly: when in its lifetime each place begins."""

Traits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """All users, or all items: so many places, and how long somebody keeps one."""

    name: str
    """Name of the column."""
    places: int
    popularity: float
    lifetime_days: float | None

    @property
    def total(self) -> int:
        """Number of ids of all who may come over the whole log."""
        if self.lifetime_days is None:
            return self.places
        return self.places * (int(DAYS / self.lifetime_days) + 2)

    @property
    def described(self) -> str:
        """What the note beside the log says of the column."""
        stay = "" if self.lifetime_days is None else f" at a time, who stay {self.lifetime_days:g} days each"
        return f"categorical, {self.places:,} ids{stay}, never missing"

    def draw(self, rng: np.random.Generator, seconds_B: Ints) -> Ints:
        """Draws who comes at these times, shape [B]."""
        column = IdColumn(name=self.name, cardinality=self.places, exponent=self.popularity)
        place_B = draw_ranks(rng, column, len(seconds_B))
        if self.lifetime_days is None:
            return place_B
        lifetimes_B = seconds_B / _SECONDS_PER_DAY / self.lifetime_days + place_B * _GOLDEN % 1
        ids_B: Ints = lifetimes_B.astype(np.int64) * self.places + place_B
        return ids_B


def populations(spec: DemoLog) -> Iterator[Population]:
    """Yields the users and the items, where there are any."""
    for name, places in ((USER, spec.users), (ITEM, spec.items)):
        if places:
            yield Population(
                name=name, places=places, popularity=spec.popularity, lifetime_days=spec.lifetime_days
            )


def with_visits(spec: DemoLog, examples: Examples, *stream: int) -> Examples:
    """Returns the examples with a user and an item each, where there are any.

    Args:
        spec: how many there are, and how they come and go.
        examples: the examples without them.
        stream: numbers that name these examples among all that are drawn from the seed.
    """
    rng = np.random.default_rng([spec.seed, _DRAWS, *stream])
    drawn = {population.name: population.draw(rng, examples.seconds_B) for population in populations(spec)}
    return replace(examples, ids={**examples.ids, **drawn})


def visit_effects(spec: DemoLog) -> dict[Name, Effect]:
    """Returns the effects of users and items that have a share of the logit's variance, not yet standardised."""
    effects: dict[Name, Effect] = {}
    for number, population in enumerate(populations(spec) if spec.own else ()):
        rng = np.random.default_rng([spec.seed, _OWN, number])
        traits = rng.standard_normal((2, population.total), dtype=np.float32)
        effects[population.name, 0] = partial(_turned, population.name, traits, spec.turn_days)
    if spec.affinity:
        vectors = {
            population.name: np.random.default_rng([spec.seed, _VECTORS, number]).standard_normal(
                (2, population.total, spec.rank), dtype=np.float32
            )
            for number, population in enumerate(populations(spec))
        }
        effects[AFFINITY, 0] = partial(_affinity, vectors[USER], vectors[ITEM][0], spec.turn_days)
    return effects


def _affinity(users: Traits, items_IR: Traits, turn_days: float | None, examples: Examples) -> Floats:
    """Returns dot products of users' vectors, which turn, with items' vectors, which do not, shape [B]."""
    user_BR = _turned(USER, users, turn_days, examples)
    products_B: Floats = np.einsum("br,br->b", user_BR, items_IR[examples.ids[ITEM]].astype(np.float64))
    return products_B


def _turned(column: str, traits: Traits, turn_days: float | None, examples: Examples) -> Floats:
    """Returns traits of a column's ids, shape [B, ...]: the first of two at the log's start, the second
    `turn_days` later, and in between a rotation from one to the other, so that their variance stays."""
    start_B: Floats
    later_B: Floats
    start_B, later_B = traits[:, examples.ids[column]].astype(np.float64)
    if turn_days is None:
        return start_B
    angle_B = np.pi / 2 * examples.seconds_B / _SECONDS_PER_DAY / turn_days
    angle_B = angle_B.reshape(-1, *[1] * (start_B.ndim - 1))
    turned_B: Floats = np.cos(angle_B) * start_B + np.sin(angle_B) * later_B
    return turned_B
