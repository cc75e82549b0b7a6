"""Evidence on earlier periods: networks trained on the rows before an origin, judged on the period after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from search.analysis.choice.evidence import of_networks
from search.analysis.choice.judge import Evidence
from search.execution.jobs import trained_job
from search.execution.retraining import RetrainingRequest, Retrainings
from trials.data.cache import PreparedLog
from trials.data.origin import LogAtOrigin
from trials.record import TrialRecord

Networks = Mapping[int, Sequence[TrialRecord]]
"""The networks of each trial, by its number."""


def with_earlier_periods(
    evidence: Evidence,
    origins: Sequence[int],
    networks: Networks,
    trial_with: Callable[[int], TrialRecord],
    log: PreparedLog,
    retrainings: Retrainings,
) -> tuple[Evidence, int]:
    """The evidence with the periods after these origins before it, and how many of them there are.

    A trial of which a network did not complete at an origin is left out from there on, and so is one that has
    learnt from a teacher, who knows later rows. An origin at which the baseline's did not complete, or all others'
    did not, is left out itself.

    Args:
        evidence: evidence on validation of the trials that are to be judged.
        origins: origins, the latest first (`trials.data.origin`).
        networks: the networks of the trials.
        trial_with: gives a trial by its number.
        log: the study's log.
        retrainings: the study's retrainings.
    """
    used = 0
    for origin in origins:
        numbers = [
            trial.number
            for trial in evidence.trials
            if all(network.job.teacher is None for network in networks[trial.number])
        ]
        requests = {
            number: [
                RetrainingRequest(trial_with(network.network_of), trained_job(network, log, origin=origin))
                for network in networks[number]
            ]
            for number in numbers
        }
        done = retrainings.run((each for some in requests.values() for each in some), score="validation")
        whole = [
            number
            for number in numbers
            if all(request.job.fingerprint in done for request in requests[number])
        ]
        if len(whole) < 2 or whole[0] != numbers[0]:
            continue
        logits = [
            [retrainings.logits(done[request.job.fingerprint], "validation") for request in requests[number]]
            for number in whole
        ]
        kept = evidence.of(whole)
        earlier = of_networks(kept.trials, logits, LogAtOrigin(log, origin))
        evidence = kept.and_earlier(earlier.loss_CK, earlier.period_K)
        used += 1
    return evidence, used
