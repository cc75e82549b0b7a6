"""Averages of a study's networks as trials of their own: chosen on validation, priced as all their members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from dhen.averaging import corrected_probability, mean_of_logits
from dhen.cost import within
from dhen.fingerprint import fingerprint
from search.averages.greedy_selection import chosen_averages
from search.execution.jobs import now
from trials.data.cache import PreparedLog
from trials.data.example_weights import example_weights
from trials.record import JobSummary, Metrics, Origin, Outcome, Result, TrialKind, TrialPlan, TrialRecord
from trials.serving_limits import Limits, summed_ms
from trials.storage.logits_file import read_logits
from trials.training.evaluation import logit_metrics

AVERAGE = "average"
"""Family of an average, in place of a model's."""
Members = tuple[TrialRecord, ...]
LogitsOf = Callable[[TrialRecord], Path]
"""A function from a network to the file of its logits on one split."""


def choose(
    pool: Sequence[TrialRecord], log: PreparedLog, split: str, logits: LogitsOf, *, most: int
) -> list[Members]:
    """The averages of 2 to `most` networks of the pool worth having, by FLOPs
    (`search.averages.greedy_selection`)."""
    rate, rows = log.schema.negative_sampling_rate, log.split(split)
    clicked_N = np.asarray(rows.labels) > 0.5
    p_SN = np.stack([corrected_probability(read_logits(logits(network)), rate) for network in pool])
    flops_S = np.array([network.job.flops for network in pool], dtype=np.float64)
    averages = chosen_averages(
        np.where(clicked_N, p_SN, 1.0 - p_SN), example_weights(rows, rate), flops_S, most=most
    )
    sets = ([pool[index] for index in average.members] for average in averages)
    return [tuple(sorted(networks, key=_sort_key)) for networks in sets]


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


def average_model(members: Members) -> dict[str, object]:
    """What stands in place of an average's model: the jobs of its members, by fingerprint, in a fixed order."""
    return {"family": AVERAGE, "members": sorted(member.job.fingerprint for member in members)}


def average_record(number: int, members: Members, validation: Metrics) -> TrialRecord:
    """An average's record as a trial: completed from the start, with FLOPs and parameters of all its members."""
    model, price = average_model(members), _price(members)
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


def _sort_key(network: TrialRecord) -> tuple[bool, int]:
    """Sort key: trials in order of number, then retrainings in order of number."""
    return network.kind is TrialKind.RETRAINING, network.number
