"""Stopping rules by name: which candidate is given up. One file each; adding one is a file and an entry."""

from __future__ import annotations

from collections.abc import Sequence

from dhen.errors import unknown_name
from search.stopping import learning_curve, rungs
from search.stopping.base import Rule, Stop
from trials.record import TrialRecord


def stop_none(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> Stop | None:
    """The rule under which every candidate is trained to its end."""
    return None


RULES: dict[str, Rule] = {"curve": learning_curve.judge, "none": stop_none, "rungs": rungs.judge}
AUTO = "none"
"""The rule that `auto` means (docs/benchmarks/stopping.md has the comparison)."""


def stopping_rule(name: str) -> Rule:
    """The rule of this name.

    Raises:
        UserError: for an unknown rule, listing the rules there are.
    """
    if name not in RULES and name != "auto":
        raise unknown_name("stopping rule", name, [*RULES, "auto"])
    return RULES[AUTO if name == "auto" else name]
