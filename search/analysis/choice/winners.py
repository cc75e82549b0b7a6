"""Which trials are confirmed: five at most, each for a reason, chosen before test is looked at.

Holm's correction over all of a long front, of which many averages are nearly equal, leaves no power to find any
difference; five different questions are what a study is asked.
"""

from __future__ import annotations

from search.pareto import knee, pareto_front
from trials.choice import MOST_WINNERS, Winner
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord

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
    the best with fewer FLOPs than the baseline, and the best within the limits of serving, where there are any.

    The baseline is none of them, nor a candidate that is the same network with the same training; a trial may be
    several.
    """
    baseline = record.trial(record.baseline or 0)
    same = {baseline.number} | {trial.number for trial in record.trials if _is_twin(trial, baseline)}
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


def _is_twin(trial: TrialRecord, baseline: TrialRecord) -> bool:
    return bool(baseline.job.fingerprint) and trial.job.fingerprint == baseline.job.fingerprint


def _flops(trial: TrialRecord) -> float:
    return trial.job.flops or 0.0
