"""Averages of a study's networks as trials of their own: chosen on validation, priced as all their members."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from dhen.cost import within
from dhen.members import corrected_probability, mean_of_logits
from dhen.values import fingerprint
from search.execution.admission import Admission, AdmittedTrial
from search.execution.later_stages import MOST_TAUGHT
from search.execution.trainer import new_record, now, trained_job
from search.selection import eligible, ne_of
from search.study_state import StudyState
from trials.data.prepared_log import PreparedLog
from trials.records.job import Job
from trials.records.metrics import PROBABILITY_FLOOR, Floats, example_weights
from trials.records.serving_limits import Limits, summed_ms
from trials.records.trial_record import (
    JobSummary,
    Metrics,
    Origin,
    Outcome,
    Result,
    TrialKind,
    TrialPlan,
    TrialRecord,
)
from trials.store.weights import read_logits
from trials.training.evaluation import logit_metrics

# Networks of the front learn from the best average, after the search: what several predict, at the FLOPs of one.
#
# Each is trained once more from its own seed, as a trial of its own, on labels that are half the average's
# prediction (`trials.data.log_views`), and joins the front if it is better.


class Lesson(NamedTuple):
    """An average, and the networks that are to learn from it."""

    teacher: TrialRecord
    members: tuple[TrialRecord, ...]
    """The networks that the average consists of."""
    missing: tuple[tuple[TrialRecord, Job, int, TrialRecord | None], ...]
    """Candidates on the front of candidates whose networks have not learnt from it so far, each with its job, the
    number of its trial, and the trial of an earlier session; the lowest NE comes first."""

    @classmethod
    def of(cls, state: StudyState, log: PreparedLog) -> Lesson | None:
        """The lesson of a study; None if it has no average.

        The teacher is the average of lowest NE, on the front or not: what learns from it may push it off, and it
        must be the same when the study is gone on with.
        """
        averages = [trial for trial in eligible(state.trials.values()) if trial.kind is TrialKind.AVERAGE]
        if not averages:
            return None
        teacher, number = min(averages, key=ne_of), len(state.trials)
        missing: list[tuple[TrialRecord, Job, int, TrialRecord | None]] = []
        taught = (trial for trial in state.trials.values() if trial.kind is TrialKind.DISTILLED)
        known = {trial.job.fingerprint: trial for trial in taught}
        for network in reversed(state.selection.networks[-MOST_TAUGHT:]):
            job = trained_job(network, log).replace(teacher=teacher.job.fingerprint)
            earlier = known.get(job.fingerprint)
            if earlier is None:
                missing.append((network, job, number, earlier))
                number += 1
            elif earlier.result.outcome.unfinished:
                missing.append((network, job, earlier.number, earlier))
        return cls(teacher, state.networks(teacher), tuple(missing))

    def trials(self, admission: Admission, has_time: Callable[[float], bool]) -> Iterator[AdmittedTrial]:
        """What is still to be trained, for as long as there is time; each is held as the candidate's network was,
        which fits."""
        for network, job, number, earlier in self.missing:
            if not has_time(network.result.training_seconds):
                return
            fresh = new_record(
                number,
                TrialKind.DISTILLED,
                network.point,
                job,
                distilled_from=network.number,
                teacher=self.teacher.number,
            ).replace(plan=network.plan)
            if earlier is not None and earlier.attempts:
                yield admission.admit(fresh, job, earlier)
            else:
                yield fresh, job


# Which networks to average: greedy forward selection on validation (Caruana et al., ICML 2004), minding FLOPs.
#
# Caruana's path starts at the best network and takes in, one after another, the network whose prediction lowers
# the mean's loss most. Here any number of FLOPs may be the budget: all pairs are tried, and from each size to
# the next every set goes on that no other of its size beats in both loss and FLOPs, so that pairs of cheap
# networks stand beside sets that grow from the best network. Networks are not taken twice: that would fit
# weights to the validation split, and cost nothing.
#
# What is selected on validation is optimistic there: the lowest of many means of the same rows is partly luck,
# the more so the more sets were tried and the shorter the split. The test split, which no choice has seen, says
# what is left of the gain.


class NetworkSet(NamedTuple):
    """A set of networks, with the FLOPs and the loss of the mean of their predictions."""

    members: tuple[int, ...]
    """Indices of the networks, ascending."""
    flops: float
    loss: float
    """Weighted mean cross-entropy in nats."""


def chosen_averages(p_SN: Floats, weight_N: Floats | None, flops_S: Floats, *, most: int) -> list[NetworkSet]:
    """Sets of two networks or more that no other set and no single network beats in both, by FLOPs.

    Args:
        p_SN: the probability that each of S networks gave, in each of N rows, to what happened.
        weight_N: weights of the rows; None if all rows count alike.
        flops_S: FLOPs of the networks.
        most: largest number of networks in a set.
    """
    networks = range(len(flops_S))

    def valued(members: tuple[int, ...]) -> NetworkSet:
        """The set with its loss: the mean's probability of what happened is the mean of the members'."""
        p_N = sum((p_SN[index] for index in members), start=np.zeros(p_SN.shape[1]))
        loss_N = -np.log(np.maximum(p_N / len(members), PROBABILITY_FLOOR))
        flops = float(flops_S[list(members)].sum())
        return NetworkSet(members, flops, float(np.average(loss_N, weights=weight_N)))

    level = tried = [valued((index,)) for index in networks]
    for _ in range(2, most + 1):
        # each set with each network that it lacks, once
        larger = {
            tuple(sorted((*each.members, index)))
            for each in level
            for index in networks
            if index not in each.members
        }
        level = _unbeaten(map(valued, sorted(larger)))
        tried = tried + level
    return [network_set for network_set in _unbeaten(tried) if len(network_set.members) > 1]


def _unbeaten(sets: Iterable[NetworkSet]) -> list[NetworkSet]:
    """Sets in order of FLOPs, each with a lower loss than all cheaper ones."""
    front: list[NetworkSet] = []
    for network_set in sorted(sets, key=lambda each: (each.flops, each.loss, each.members)):
        if network_set.loss < (front[-1].loss if front else math.inf):
            front.append(network_set)
    return front


AVERAGE = "average"
"""Family of an average, in place of a model's."""
Members = tuple[TrialRecord, ...]
LogitsOf = Callable[[TrialRecord], Path]
"""A function from a network to the file of its logits on one split."""


def choose(
    pool: Sequence[TrialRecord], log: PreparedLog, split: str, logits: LogitsOf, *, most: int
) -> list[Members]:
    """The averages of 2 to `most` networks of the pool worth having, by FLOPs."""
    rate, rows = log.schema.negative_sampling_rate, log.split(split)
    clicked_N = np.asarray(rows.labels) > 0.5
    p_SN = np.stack([corrected_probability(read_logits(logits(network)), rate) for network in pool])
    flops_S = np.array([network.job.flops for network in pool], dtype=np.float64)
    averages = chosen_averages(
        np.where(clicked_N, p_SN, 1.0 - p_SN),
        example_weights(rows.labels, rows.weight, rate),
        flops_S,
        most=most,
    )
    sets = ([pool[index] for index in average.members] for average in averages)
    # trials in order of number, then retrainings
    order = [
        sorted(networks, key=lambda each: (each.kind is TrialKind.RETRAINING, each.number))
        for networks in sets
    ]
    return [tuple(networks) for networks in order]


def meets(limits: Limits, members: Members) -> bool:
    """Whether all members together, one after another, are within the limits."""
    return (limits.excess(**_price(members)) or 0.0) <= 0


def mean_metrics(members: Members, log: PreparedLog, split: str, logits: LogitsOf) -> Metrics:
    """Metrics of the mean of the networks' predictions, worked out as a single network's are."""
    member_logits = [read_logits(logits(member)) for member in members]
    mean_N = mean_of_logits(member_logits, log.schema.negative_sampling_rate)
    return logit_metrics(torch.from_numpy(mean_N), log.split(split), log)


def mean_probability(members: Members, log: PreparedLog, logits: LogitsOf) -> NDArray[np.float32]:
    """What the mean of the networks' predictions is for the training rows (N), as a network predicts it: not
    corrected for negative sampling."""
    member_logits = [read_logits(logits(member)) for member in members]
    mean_N: NDArray[np.float32] = expit(mean_of_logits(member_logits, log.schema.negative_sampling_rate))
    return mean_N


def average_record(number: int, members: Members, validation: Metrics) -> TrialRecord:
    """An average's record as a trial: completed from the start, with FLOPs and parameters of all its members."""
    # in place of a model stand the jobs of the members, by fingerprint, in a fixed order
    model = {"family": AVERAGE, "members": sorted(member.job.fingerprint for member in members)}
    price = _price(members)
    retrained = [member for member in members if member.kind is TrialKind.RETRAINING]
    return TrialRecord(
        number=number,
        kind=TrialKind.AVERAGE,
        origin=Origin(
            started_at=now(),
            members=tuple(member.number for member in members if member not in retrained),
            retrained_members=tuple(member.number for member in retrained),
        ),
        job=JobSummary(
            fingerprint=fingerprint(model),
            model=model,
            cost=tuple(
                row for i, member in enumerate(members) for row in within(f"member{i}", member.job.cost)
            ),
            flops=price["flops"],
            parameters=sum(member.job.parameters or 0 for member in members),
            embedding_parameters=sum(member.job.embedding_parameters or 0 for member in members),
            weights_bytes=price["weights_bytes"],
            table_bytes=price["table_bytes"],
        ),
        plan=TrialPlan(technique=None, serving_ms=price["ms"]),
        result=Result(outcome=Outcome.COMPLETED, validation=validation, seconds=0.0),
    )


def _price(members: Members) -> dict[str, Any]:
    """Quantities that may have limits, for all members one after another."""
    return {
        "flops": sum(member.job.flops or 0.0 for member in members),
        "weights_bytes": sum(member.job.weights_bytes or 0 for member in members),
        "table_bytes": sum(member.job.table_bytes or 0 for member in members),
        "ms": summed_ms(member.plan.serving_ms for member in members),
    }
