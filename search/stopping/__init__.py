"""Stopping rules by name: which candidate is given up. One file each; adding one is a file and an entry."""

from __future__ import annotations

from dhen.errors import unknown_name
from search.stopping import curve, none, rungs
from search.stopping.rule import Rule

RULES: dict[str, Rule] = {"curve": curve.judge, "none": none.judge, "rungs": rungs.judge}
AUTO = "none"
"""What `auto` means (docs/benchmarks/stopping.md has the comparison)."""


def stopping_rule(name: str) -> Rule:
    """The rule of this name.

    Raises:
        UserError: for an unknown one, listing those there are.
    """
    if name not in RULES and name != "auto":
        raise unknown_name("stopping rule", name, [*RULES, "auto"])
    return RULES[AUTO if name == "auto" else name]
