"""What a study on a part of the log says of its rows, and how its ranking changed on all of them."""

from __future__ import annotations

import math

from dashboards.units import decimals
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord


def promotion(record: StudyRecord) -> str | None:
    """In a sentence; None where all trials were trained on all rows."""
    searched = (trial for trial in record.trials if trial.promoted_from is None)
    fraction = next(
        (f for trial in searched if (f := trial.training.get("train_fraction")) is not None), None
    )
    if fraction is None:
        return None
    rows = record.log.rows.get("train", 0)
    part = f"The search trained on the last {round(fraction * rows):,} of {rows:,} training rows"
    done = [trial for trial in record.promoted if trial.outcome is Outcome.COMPLETED]
    if not record.promoted:
        return f"{part}; when it is over, the front and the baseline are trained on all of them."
    best = min((t for t in done if t.kind is TrialKind.CANDIDATE), key=_ne, default=None)
    if best is None or record.baseline not in {trial.number for trial in done}:
        return f"{part}; of the front and the baseline {len(done)} have been trained on all of them so far."
    own = sum(trial.kind is TrialKind.CANDIDATE for trial in done)
    front = "the front's candidate and the" if own == 1 else f"the front's {own} candidates and the"
    return (
        f"{part}; {front} baseline were then trained on all of them, and what is said here is of these. "
        f"{_tau(done, record)}{_first(best, done, record)}"
    )


def _tau(done: list[TrialRecord], record: StudyRecord) -> str:
    """Of the trials' NE on a part of the log and on all of it; nothing for fewer than two."""
    from scipy.stats import kendalltau  # a second of imports that other studies need not wait for

    part, whole = zip(*[(_ne(record.trial(_source(trial))), _ne(trial)) for trial in done], strict=True)
    tau = float(kendalltau(part, whole).statistic)
    if math.isnan(tau):
        return ""
    return f"Kendall tau between both rankings is {decimals(tau, 2)}. "


def _first(best: TrialRecord, done: list[TrialRecord], record: StudyRecord) -> str:
    """The best on all rows, and whether it was the best on a part of them."""
    field = [record.trial(_source(trial)) for trial in done if trial.kind is TrialKind.CANDIDATE]
    before = min(field, key=_ne)
    if before.number == best.promoted_from:
        return f"The best of them on all rows is the search's own best, trial {before.number}."
    own = f"trial {best.promoted_from} of the search, whose own best was {before.number}"
    return f"The best of them on all rows is {own}."


def _source(trial: TrialRecord) -> int:
    assert trial.promoted_from is not None
    return trial.promoted_from


def _ne(trial: TrialRecord) -> float:
    return trial.validation.ne if trial.validation else math.nan
