"""Whether a second pass over the training rows would have helped, measured: the baseline trained with two passes.

Where `training.epochs` is left open, large logs are passed over once, since models with id embeddings commonly
overfit from the second pass on (arXiv 2209.06053). On a log whose ids seldom recur further passes can be worth
more than any architecture. Which log is which only a training shows, so one is spent on it before the search. It
is a retraining in the ledger: neither a candidate nor the baseline, and it goes on after an interruption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dashboards.sentences.stages import second_pass
from search.execution.retraining import RetrainingRequest, Retrainings
from search.study_state import StudyState
from trials.job import Job
from trials.record import TrialRecord

PASSES = 2
SHARE_OF_MINUTES = 0.1
"""Largest share of a study's minutes that is spent on the training."""

LOG = logging.getLogger(__name__)


def try_second_pass(
    state: StudyState,
    retrainings: Retrainings,
    job_of: Callable[[TrialRecord], Job],
    *,
    minutes: float | None,
) -> None:
    """Trains the baseline with two passes, where they may help, and says what came of it.

    Args:
        state: the study's, whose baseline has completed; nothing is begun once there are candidates.
        retrainings: the study's retrainings.
        job_of: returns the job of the baseline's trial with two passes.
        minutes: the study's budget, of which a small share may be spent.
    """
    tried = [record for record in state.retrainings.values() if record.origin.passes == PASSES]
    if any(not record.result.outcome.unfinished for record in tried) or (state.candidates and not tried):
        return
    baseline = state.require_baseline()
    if not tried and (reason := _reason_against(baseline, minutes)):
        LOG.info("a second pass is not tried: %s", reason)
        return
    state.say(
        f"trial {baseline.number}, the baseline, is trained with {PASSES} passes: would they have helped?"
    )
    request = RetrainingRequest(baseline, job_of(baseline), passes=PASSES)
    for record in retrainings.run([request]).values():
        retrainings.drop_weights(record)
    sentence = second_pass(state.record())
    if sentence is not None:
        LOG.info("%s", sentence)
        state.say(sentence)


def _reason_against(baseline: TrialRecord, minutes: float | None) -> str | None:
    """Returns why the training would be in vain or too long; None where it is neither."""
    if baseline.job.training.get("epochs") != 1:
        return "one pass was not the default"
    curve = [point.validation.ne for point in baseline.result.curve]
    if not curve or curve[-1] > min(curve):
        return "the baseline was at its best before its pass was over"
    # a result of another study took no time here, but its measurements say what a training takes
    seconds = max(baseline.result.seconds or 0.0, baseline.result.measured.whole_seconds)
    if minutes is not None and PASSES * seconds > SHARE_OF_MINUTES * 60.0 * minutes:
        return f"it would take more than {SHARE_OF_MINUTES:.0%} of the study's minutes"
    return None
