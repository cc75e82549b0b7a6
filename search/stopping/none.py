"""No stopping: every candidate is trained to its end."""

from __future__ import annotations

from collections.abc import Sequence

from search.stopping.rule import Stop
from trials.record import TrialRecord


def judge(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> Stop | None:
    """See `search.stopping.rule.Rule`."""
    return None
