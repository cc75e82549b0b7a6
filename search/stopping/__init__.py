"""Stopping rules by name: which candidate is given up. One file each; adding one is a file and an entry."""

from __future__ import annotations

from dhen.errors import unknown_name
from search.stopping import learning_curve
from search.stopping.base import Judge

RULES: dict[str, Judge] = {"curve": learning_curve.judge}
NONE = "none"
"""Instead of a rule: every candidate is trained to its end."""
AUTO = NONE
"""The rule that `auto` means (docs/benchmarks/stopping.md has the comparison)."""


def stopping_rule(name: str) -> Judge | None:
    """The rule of this name; None for `none`.

    Raises:
        UserError: for an unknown rule, listing the rules there are.
    """
    if name == "auto":
        name = AUTO
    if name == NONE:
        return None
    if name not in RULES:
        raise unknown_name("stopping rule", name, [*RULES, NONE, "auto"])
    return RULES[name]
