"""The built-in demo click log: generated from a known teacher, not collected, and it says so wherever it goes.

It looks like Criteo's (13 counts, 26 categorical columns) with two multi-hot columns, time stamps and a drifting
base rate. It also has the true probability of every label, so the lowest NE that any model can reach is known.

The teacher's logit is an intercept plus weighted products of one to four *effects*: functions of one column each,
standardised to mean 0 and variance 1. Columns are independent (only `I13` reports a drift), so products of
different columns are uncorrelated, and a weight squared is a product's part of the logit's variance. The order of
random numbers decides every bit of the log, and figures rest on it: users and items have streams of their own.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dhen.values import Value

LOGIT_DEVIATION = 1.75
"""Standard deviation of the teacher's logit: the lowest reachable NE is about 0.70."""
SHARES = {"first": 0.25, "second": 0.3, "third": 0.25, "fourth": 0.15, "drift": 0.05}
"""Shares of the logit's variance: effects of single columns, products of two, three and four, and the hour of day
with the drift. They divide what `own` and `affinity` leave."""
TIME, USER, ITEM, AFFINITY = "timestamp", "user", "item", "affinity"


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
    users: int = Field(default=0, ge=0, le=10_000_000)
    """Number of users, who are there at any time, in the column `user`; 0: no such column."""
    items: int = Field(default=0, ge=0, le=10_000_000)
    """Number of items, which are there at any time, in the column `item`; 0: no such column."""
    own: float = Field(default=0.0, ge=0, le=1)
    """Share of the logit's variance in effects of users alone and items alone, each with one of its own."""
    affinity: float = Field(default=0.0, ge=0, le=1)
    """Share of the logit's variance in which user likes which item: the dot product of a vector of the user and
    one of the item, which only those learn who see both several times."""
    lifetime_days: float | None = Field(default=None, ge=0.1)
    """Days that a user or an item stays, until a new one takes its place; null: all stay."""

    @property
    def populations(self) -> dict[str, int]:
        """How many users and how many items are there at any time, by column; none of which there are 0."""
        return {name: places for name, places in ((USER, self.users), (ITEM, self.items)) if places}

    @model_validator(mode="after")
    def _has_ids_for_its_effects(self) -> Self:
        for name in ("own", "affinity", "lifetime_days"):
            if getattr(self, name) and not self.populations:
                raise ValueError(f"{name} is about users and items: give users=, items= or both")
        if self.affinity and not (self.users and self.items):
            raise ValueError("affinity is of users to items: give both users= and items=")
        if (share := self.own + self.affinity) > 1:
            raise ValueError(
                f"own and affinity are of one variance, so at most 1 together, received {share:g}"
            )
        comers = max(self.users, self.items) * (1 + 10 / (self.lifetime_days or float("inf")))
        if comers > 20_000_000:  # the effects of all who ever come are in memory
            raise ValueError(
                f"{comers:,.0f} users or items would come and go, at most 20,000,000 may: give fewer of them, or "
                "a longer lifetime_days"
            )
        return self
