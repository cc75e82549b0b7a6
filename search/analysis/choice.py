"""The choice of a study's best: within the noise of choosing, the steadier and the cheaper, perhaps the baseline.

It is the one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3),
in pairs: what is worse than the lowest NE by no more than one standard error of that very difference is as
good as the lowest, as far as these rows can say. The baseline, which was not chosen among many, is as good
if it is worse by no more than that and what the lowest owes to having been chosen; then it is the best,
unless it is over a limit: what is new has to show that it is better. Else, of those as good, the ones that are
worse than the baseline in the fewest periods stand first, then the one with the fewest FLOPs.

Shapes: C trials, K blocks, P periods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.analysis.losses import block_sums, blocks_of
from search.analysis.statistics import optimism_percent, relative_percent, standard_errors
from search.execution.retraining import RetrainingRequest, Retrainings
from search.execution.trainer import trained_job
from search.selection import knee, pareto_front
from trials.data.log_views import LogAtOrigin
from trials.data.prepared_log import PreparedLog
from trials.records.findings import MOST_WINNERS, Choice, JudgedTrial, Winner
from trials.records.metrics import Floats
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind, TrialRecord

LEAST_BLOCKS = 2
"""Number of blocks in a period below which it has no standard error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Losses of trials on the same rows, which none of them was trained on."""

    trials: tuple[TrialRecord, ...]
    """The baseline first, then candidates and averages."""
    loss_CK: Floats
    """Sums of weighted losses by trial and block of rows."""
    period_K: NDArray[np.int64]
    """Number of the period that each block lies in, 0, 1, 2 ... in time."""

    def of(self, numbers: Sequence[int]) -> Evidence:
        """The evidence of the baseline and of these trials alone."""
        kept = [index for index, each in enumerate(self.trials) if index == 0 or each.number in numbers]
        trials = tuple(self.trials[index] for index in kept)
        return replace(self, trials=trials, loss_CK=self.loss_CK[kept])

    def and_earlier(self, loss_CK: Floats, period_K: NDArray[np.int64]) -> Evidence:
        """The evidence with earlier periods of the same trials put before it."""
        period_K = np.concatenate([period_K, self.period_K + period_K.max() + 1])
        return replace(self, loss_CK=np.concatenate([loss_CK, self.loss_CK], axis=1), period_K=period_K)

    @property
    def periods(self) -> int:
        """Number of periods, P."""
        return int(self.period_K.max()) + 1


class Verdict(NamedTuple):
    """The best of some trials, and what it was chosen by."""

    best: int
    lowest: int
    optimism_percent: float
    judged: tuple[JudgedTrial, ...]


def judge(evidence: Evidence, *, optimism: float | None = None) -> Verdict:
    """The best by the rule of this file.

    Args:
        evidence: losses of all that may be the best.
        optimism: what the lowest owes to having been chosen, in percent, if it was chosen among more than
            these; None: worked out from these.
    """
    trials, loss_CK = evidence.trials, evidence.loss_CK
    if optimism is None:
        optimism = optimism_percent(loss_CK[1:])
    # the baseline is trained although it may be over limits that the best has to keep
    excesses = (trials[0].plan.memory_excess, trials[0].plan.serving_excess)
    first = int(len(trials) > 1 and any((excess or 0.0) > 0.0 for excess in excesses))
    lowest = first + int(loss_CK[first:].sum(axis=1).argmin())
    percent_C = relative_percent(loss_CK, loss_CK[lowest])
    error_C = standard_errors(loss_CK, loss_CK[lowest])
    noise_C = error_C.copy()
    noise_C[0] += optimism  # the others, too, were chosen on these rows
    # NE relative to the baseline's by period (P, C), and in how many each is worse by a standard error (C)
    by_period_PC, worse_C = [], np.zeros(len(trials), dtype=np.int64)
    for period in range(evidence.periods):
        period_CK = loss_CK[:, evidence.period_K == period]
        by_period_PC.append(relative_percent(period_CK, period_CK[0]))
        if period_CK.shape[1] >= LEAST_BLOCKS:
            worse_C += by_period_PC[-1] > standard_errors(period_CK, period_CK[0])
    worse_C[0] = 0  # the baseline is as good as itself, whatever rounding says
    judged = [
        JudgedTrial(
            trial=trial.number,
            percent=float(percent_C[index]),
            standard_error=float(error_C[index]),
            close=bool(index == lowest or percent_C[index] <= noise_C[index]),
            by_period=tuple(float(percent_C[index]) for percent_C in by_period_PC),
            worse_periods=int(worse_C[index]),
        )
        for index, trial in enumerate(trials)
    ]
    flops = {trial.number: trial.job.flops or 0.0 for trial in trials}
    if judged[0].close and not first:
        best = judged[0]
    else:
        best = min(
            (verdict for verdict in judged[1:] if verdict.close),
            key=lambda verdict: (verdict.worse_periods, flops[verdict.trial], verdict.trial),
        )
    return Verdict(
        best=best.trial,
        lowest=trials[lowest].number,
        optimism_percent=optimism,
        judged=tuple(sorted(judged, key=lambda verdict: verdict.trial)),
    )


# Losses of trials on validation by block of consecutive rows, in periods: what a choice rests on.

PERIODS = 4
"""Number of periods that validation is divided into, in time: each is long enough to have an error of its own."""


def on_validation(
    trials: Sequence[TrialRecord],
    networks_of: Callable[[TrialRecord], Sequence[TrialRecord]],
    log: PreparedLog,
    logits: Callable[[TrialRecord], Path],
) -> Evidence | None:
    """The evidence of trials that have kept their logits on validation; None if it has too few rows for blocks.

    Args:
        trials: the baseline, then candidates and averages.
        networks_of: gives the networks of a trial.
        log: the study's log.
        logits: gives the file of a network's logits.
    """
    if log.manifest.rows["validation"] < LEAST_BLOCKS:
        return None
    return of_networks(trials, [[logits(network) for network in networks_of(trial)] for trial in trials], log)


def of_networks(
    trials: Sequence[TrialRecord], logits: Sequence[Sequence[Path]], log: PreparedLog
) -> Evidence:
    """The evidence of trials on a log's validation, from the files of the logits of each one's networks."""
    split = log.split("validation")
    blocks, rate = blocks_of(log, split), log.schema.negative_sampling_rate
    loss_CK = np.stack([block_sums(files, split, rate, blocks) for files in logits])
    in_time = split.timestamp is not None and blocks.count >= PERIODS * LEAST_BLOCKS
    # without time stamps there is one period
    period_K = np.arange(blocks.count) * (PERIODS if in_time else 1) // blocks.count
    return Evidence(trials=tuple(trials), loss_CK=loss_CK, period_K=period_K)


# Evidence on earlier periods: networks trained on the rows before an origin, judged on the period after it.

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
        origins: origins, the latest first (`trials.data.log_views`).
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
        logits = {
            number: [retrainings.logits(done[each.job.fingerprint], "validation") for each in some]
            for number, some in requests.items()
            if all(each.job.fingerprint in done for each in some)
        }
        whole = list(logits)
        if len(whole) < 2 or whole[0] != numbers[0]:
            continue
        kept = evidence.of(whole)
        earlier = of_networks(kept.trials, list(logits.values()), LogAtOrigin(log, origin))
        evidence = kept.and_earlier(earlier.loss_CK, earlier.period_K)
        used += 1
    return evidence, used


# Which trials are confirmed: five at most, each for a reason, chosen before test is looked at.
#
# Holm's correction over all of a long front, of which many averages are nearly equal, leaves no power to find
# any difference; five different questions are what a study is asked.

REASONS = (
    "best",
    "knee",
    "best network",
    "best average",
    "best below the baseline's FLOPs",
    "best within the limits of serving",
)
"""What a trial may be chosen as, from the most important down."""


def winners_of(record: StudyRecord, best: int | None) -> tuple[Winner, ...]:
    """The trials of a study that are confirmed, by FLOPs: `best`, the knee, the best network, the best average,
    the best with fewer FLOPs than the baseline, and the best within the limits of serving, if there are any.

    The baseline is none of them, nor a candidate that is the same network with the same training; a trial may be
    several.
    """
    baseline = record.trial(record.baseline or 0)
    twins = (each.number for each in record.trials if each.job.fingerprint == baseline.job.fingerprint)
    same = {baseline.number, *(twins if baseline.job.fingerprint else ())}
    front = [record.trial(number) for number in record.front if number not in same]
    averages = [trial for trial in front if trial.kind is TrialKind.AVERAGE]
    bend, networks = knee(front), pareto_front([trial for trial in record.field if trial.number not in same])
    cheaper = [trial for trial in front if _flops(trial) < _flops(baseline)]
    parts = (
        [trial for trial in front if trial.number == best],
        [bend] if bend is not None else [],
        networks,
        averages,
        cheaper,
        # what is over a limit was not trained, and no average of it was made
        front if record.serving.limited else [],
    )
    chosen: dict[int, tuple[TrialRecord, tuple[str, ...]]] = {}
    for reason, trials in zip(REASONS, parts, strict=True):
        if trials:
            winner = trials[-1]  # lists are by FLOPs, so the lowest NE is last
            chosen[winner.number] = winner, (*chosen.get(winner.number, (winner, ()))[1], reason)
    # the lowest NE of all is a network or an average, so the last part adds none
    assert len(chosen) <= MOST_WINNERS
    by_flops = sorted(chosen.values(), key=lambda pair: (_flops(pair[0]), pair[0].number))
    return tuple(Winner(trial=trial.number, reasons=reasons) for trial, reasons in by_flops)


def _flops(trial: TrialRecord) -> float:
    return trial.job.flops or 0.0


# A study's choice, from its record and the evidence on validation: its best, and the winners to confirm.


def choice_with_origins(record: StudyRecord, choice: Choice, evidence: Evidence, origins: int) -> Choice:
    """The choice, judged once more by the winners' losses on earlier periods too.

    The winners were chosen on validation among all near the front, and validation's rows are of the evidence: what
    the lowest owes to that stays as it was worked out there.

    Args:
        record: the study.
        choice: the choice on validation alone.
        evidence: losses of the baseline and the winners on validation and on the periods before it.
        origins: number of earlier origins that were judged.
    """
    verdict = judge(evidence, optimism=choice.optimism_percent)
    return choice.replace(
        best=verdict.best,
        lowest=verdict.lowest,
        winners=winners_of(record, verdict.best),
        periods=evidence.periods,
        origins=origins,
        judged=verdict.judged,
    )


def choice_of(record: StudyRecord, evidence: Evidence | None) -> Choice:
    """The choice of a study that has a baseline and a front.

    Args:
        record: the study.
        evidence: losses on validation of the baseline, the front and others near it; None if validation has too
            few rows to say how sure a choice is. Then the lowest NE is the best.
    """
    assert record.baseline is not None
    chosen = Choice(
        front=record.front,
        baseline=record.baseline,
        best=record.front[-1],
        lowest=record.front[-1],
        winners=winners_of(record, record.front[-1]),
    )
    if evidence is None:
        return chosen
    verdict = judge(
        evidence.of((record.baseline, *record.front)), optimism=optimism_percent(evidence.loss_CK[1:])
    )
    return chosen.replace(
        best=verdict.best,
        lowest=verdict.lowest,
        winners=winners_of(record, verdict.best),
        compared=len(evidence.trials) - 1,
        optimism_percent=verdict.optimism_percent,
        periods=evidence.periods,
        judged=verdict.judged,
    )
