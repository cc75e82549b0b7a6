"""Stops a candidate whose curve, extrapolated with its uncertainty, can no longer reach the NE-FLOPs front.

FLOPs are known before training, so the front needs no guess in that direction: a candidate whose optimistic final
NE (`forecast`) is no lower than that of a trial on the front with no more FLOPs is dominated, whatever
it still does.
"""

from __future__ import annotations

from collections.abc import Sequence

from search.pareto import ne_of, pareto_front
from search.stopping.base import FEWEST, Stop, like, went_on
from trials.record import TrialKind, TrialRecord


def judge(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> Stop | None:
    """Stops a candidate that can no longer reach the front; a `search.stopping.base.Judge`."""
    from search.stopping.forecast import CONFIDENCE, forecast

    milestone = candidate.result.curve[-1]
    finished = went_on(len(candidate.result.curve), like(candidate, trials))
    rival = _cheaper(candidate, trials)
    if len(finished) < FEWEST or rival is None:
        return None
    expected, rival_ne = forecast(candidate, finished), ne_of(rival)
    if not rival_ne <= expected.low:
        return None
    return Stop(
        f"stopped at {milestone.examples:,} examples with NE {milestone.validation.ne:.5f}: expected to end "
        f"at {expected.ne:.5f}, not below {expected.low:.5f} ({100 * CONFIDENCE:.0f} %), and trial "
        f"{rival.number} has {rival_ne:.5f} at {_share(rival, candidate)} its FLOPs",
        expected.ne,
    )


def _cheaper(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The best trial on the front with no more FLOPs than the candidate; None where there is none."""
    assert candidate.job.flops is not None
    front = pareto_front(trial for trial in trials if trial.kind is TrialKind.CANDIDATE)
    no_dearer = [
        trial for trial in front if trial.job.flops is not None and trial.job.flops <= candidate.job.flops
    ]
    return no_dearer[-1] if no_dearer else None


def _share(rival: TrialRecord, candidate: TrialRecord) -> str:
    return f"{(rival.job.flops or 0.0) / max(candidate.job.flops or 0.0, 1.0):.2g} times"
