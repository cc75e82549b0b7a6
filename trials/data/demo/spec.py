"""The settings from which a demo log is made: how many rows, which seed, how strong each order of interaction
is."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from dhen.values import Value


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
    """Shares of the logit's variance, by order of interaction."""
