"""A study's choice, from its record and the evidence on validation: its best, and the winners to confirm."""

from __future__ import annotations

from search.analysis.choice.judge import Evidence, judge
from search.analysis.choice.winners import winners_of
from search.analysis.statistics.selection import optimism_percent
from trials.choice import Choice
from trials.study_record import StudyRecord


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
        evidence: losses on validation of the baseline, the front and others near it; None where validation has too
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
