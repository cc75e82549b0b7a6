"""The settings from which a demo log is made: how many rows, which seed, how strong each order of interaction
is, and which users and items recur."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from dhen.values import Value
from trials.data.demo.columns import HEAD

DAYS = 10
"""Days that the log spans."""
MOST_COMERS = 20_000_000
"""Largest number of users, or of items, who come over the whole log: the vectors of all are in memory."""


class Shares(Value):
    """Shares of the variance of the teacher's logit by order of interaction; they add up to 1."""

    first: float = Field(default=0.25, ge=0, le=1)
    """Share of effects of single columns."""
    second: float = Field(default=0.30, ge=0, le=1)
    """Share of products of two columns: id x id, number x id, bag x id."""
    third: float = Field(default=0.25, ge=0, le=1)
    """Share of products of three columns."""
    fourth: float = Field(default=0.15, ge=0, le=1)
    """Share of products of four columns."""
    drift: float = Field(default=0.05, ge=0, le=1)
    """Share of the hour of day, and of the slow drift that column `I13` reports."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = math.fsum(self.to_dict().values())
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ValueError(f"the shares of logit variance must add up to 1, these add up to {total:g}")
        return self


class DemoLog(Value):
    """A generated click log: equal values give equal logs, equal seeds the same teacher for any `rows`.

    Build it from a user's settings with `dhen.values.parse`, which raises `UserError`.
    """

    rows: int = Field(default=1_000_000, ge=1)
    """Number of examples, in time order over ten days."""
    seed: int = Field(default=0, ge=0)
    """Seed that decides the teacher and the examples."""
    base_rate: float = Field(default=0.22, ge=0.001, le=0.9)
    """Fraction of positives, in expectation."""
    logit_deviation: float = Field(default=1.75, gt=0, le=10)
    """Standard deviation of the teacher's logit; the larger, the lower the reachable NE (0.70 by default)."""
    shares: Shares = Shares()
    """Shares of the logit's variance, by order of interaction; they divide what `own` and `affinity` leave."""
    most_ids: int | None = Field(default=None, gt=HEAD)
    """Largest number of ids in each of the columns C1 to C26, M1 and M2, where the last stands for all rarer ones;
    labels are as without it, because they follow from the 100 most frequent ids. Null: up to 100,000 ids, most of
    them rare."""
    users: int = Field(default=0, ge=0, le=10_000_000)
    """Number of users, who are there at any time, in the column `user`; 0: no such column."""
    items: int = Field(default=0, ge=0, le=10_000_000)
    """Number of items, which are there at any time, in the column `item`; 0: no such column."""
    visits_alone: bool = False
    """Whether the columns of users and items are the only inputs, beside the time stamp's; they then decide labels
    alone, so `own` and `affinity` add up to 1."""
    popularity: float = Field(default=0.0, ge=0, le=3)
    """How much more often some users and items come than others: the k-th in proportion to k ** -popularity. 0:
    all equally often."""
    own: float = Field(default=0.0, ge=0, le=1)
    """Share of the logit's variance in effects of users alone and items alone, each with one of its own."""
    affinity: float = Field(default=0.0, ge=0, le=1)
    """Share of the logit's variance in which user likes which item: the dot product of a vector of the user and
    one of the item, which only those learn who see both several times."""
    rank: int = Field(default=2, ge=1, le=32)
    """Length of these vectors."""
    lifetime_days: float | None = Field(default=None, ge=0.1)
    """Days that a user or an item stays, until a new one takes its place; null: all stay."""
    turn_days: float | None = Field(default=None, gt=0)
    """Days in which effects of users and items turn into others that have nothing to do with them; after as many
    again they are reversed. Null: they stay as they are."""

    @model_validator(mode="after")
    def _has_ids_for_its_effects(self) -> Self:
        for name in ("visits_alone", "popularity", "own", "affinity", "lifetime_days", "turn_days"):
            if getattr(self, name) and not (self.users or self.items):
                raise ValueError(f"{name} is about users and items: give users=, items= or both")
        if self.affinity and not (self.users and self.items):
            raise ValueError("affinity is of users to items: give both users= and items=")
        if self.own + self.affinity > 1:
            raise ValueError(
                f"own and affinity are shares of one variance, so at most 1 together, received "
                f"{self.own + self.affinity:g}"
            )
        if self.visits_alone and not math.isclose(self.own + self.affinity, 1.0, abs_tol=1e-9):
            raise ValueError(
                "visits_alone leaves out the columns that decide what own and affinity do not: give shares that "
                f"add up to 1, such as own=0.1 affinity=0.9, received {self.own:g} and {self.affinity:g}"
            )
        comers = max(self.users, self.items) * (1 + DAYS / (self.lifetime_days or math.inf))
        if comers > MOST_COMERS:
            raise ValueError(
                f"{comers:,.0f} users or items would come and go over {DAYS} days, at most {MOST_COMERS:,} may: "
                "give fewer of them, or a longer lifetime_days"
            )
        return self
