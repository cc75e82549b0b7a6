"""What a table of trials shows of each trial, for the page and for the terminal alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dashboards.names import trial_name
from dashboards.units import known
from trials.record import Curve, Metrics, Outcome, TrialRecord
from trials.study_record import StudyRecord, relative_ne_curve, relative_ne_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial and what a table says of it besides; whatever the trial's record has is read from there."""

    trial: TrialRecord
    marks: tuple[str, ...]
    """What the study says of the trial: `baseline`, `best`, `knee`, `front`, in this order."""
    name: str
    """The model in short."""
    quality: Metrics | None
    """Metrics on validation, at the best point of the curve; for a running trial at its newest point."""
    relative_percent: float | None
    """NE relative to the tuned baseline; for a running trial at the same number of examples."""
    remark: str | None
    """Which trial it tunes, whose result it shares, its error; or that its plan does not fit, though trained."""

    @property
    def ne(self) -> float | None:
        """NE on validation, where it is known and finite."""
        return self.quality.ne if self.quality and known(self.quality.ne) else None


def trial_rows(record: StudyRecord, trials: Iterable[TrialRecord] | None = None) -> tuple[TrialRow, ...]:
    """Rows of all trials in order, or of `trials` alone."""
    shown = record.trials if trials is None else trials
    return tuple(_row(trial, record, known_ne(record.baseline_for(trial))) for trial in shown)


def baseline_ne(record: StudyRecord) -> float | None:
    """The tuned baseline's NE on validation, once there is one."""
    return known_ne(find(record, record.baseline))


def known_ne(trial: TrialRecord | None) -> float | None:
    """Returns the NE of a trial on validation; None where there is no trial, or it has none that is a number."""
    return (
        trial.result.validation.ne
        if trial and trial.result.validation and known(trial.result.validation.ne)
        else None
    )


def find(record: StudyRecord, number: int | None) -> TrialRecord | None:
    """The trial with this number, if the record has it."""
    return next((trial for trial in record.trials if trial.number == number), None)


def relative_percent(ne: float | None, baseline: float | None) -> float | None:
    """NE relative to the baseline in percent where both are known."""
    return relative_ne_percent(ne, baseline) if ne is not None and baseline is not None else None


def marks(trial: TrialRecord, record: StudyRecord) -> tuple[str, ...]:
    """What the study says of a trial: any of `baseline`, `best`, `knee`, `front`."""
    holds = {
        "baseline": trial.number == record.baseline,
        "best": trial.number == record.best,
        "knee": trial.number == record.knee,
        "front": trial.number in record.front,
    }
    return tuple(name for name, is_true in holds.items() if is_true)


def _row(trial: TrialRecord, record: StudyRecord, baseline: float | None) -> TrialRow:
    live = trial.result.outcome is Outcome.RUNNING and bool(trial.result.curve)
    quality = trial.result.curve[-1].validation if live else trial.result.validation
    ne = quality.ne if quality and known(quality.ne) else None
    return TrialRow(
        trial=trial,
        marks=marks(trial, record),
        name=trial_name(trial),
        quality=quality,
        relative_percent=_relative_so_far(trial, record) if live else relative_percent(ne, baseline),
        remark=_remark(trial),
    )


def _relative_so_far(trial: TrialRecord, record: StudyRecord) -> float | None:
    baseline = record.baseline_for(trial)
    pairs = relative_ne_curve(trial.result.curve[-1:], baseline.result.curve if baseline else Curve())
    return pairs[0][1] if pairs and known(pairs[0][1]) else None


def _remark(trial: TrialRecord) -> str | None:
    tuned = f"tuned of trial {trial.origin.tuned_from}" if trial.origin.tuned_from is not None else None
    remarks = (
        tuned,
        _proposed(trial),
        _distilled(trial),
        shared_with(trial),
        _on_all_rows(trial),
        trial.result.error,
    )
    return ": ".join(remark for remark in remarks if remark) or does_not_fit(trial)


def _proposed(trial: TrialRecord) -> str | None:
    """Who proposed a candidate, and why, in the words of the proposal."""
    proposal = trial.origin.proposal
    if proposal is None:
        return None
    return f"proposed{proposal.by_words}" + (f" ({proposal.why})" if proposal.why else "")


def _distilled(trial: TrialRecord) -> str | None:
    """Whose network a trial has, and which average it learnt from, where it did."""
    origin = trial.origin
    if origin.distilled_from is None:
        return None
    return f"trial {origin.distilled_from}'s network, which learnt from trial {origin.teacher}"


def shared_with(trial: TrialRecord) -> str | None:
    """Which trial's training gave the result, in words, where it is not the trial's own."""
    if trial.origin.reused_from is not None:
        return f"same network as trial {trial.origin.reused_from}"
    origin = trial.origin.reused_from_study
    return f"trained as trial {origin.trial} of the study in {origin.directory}" if origin else None


def _on_all_rows(trial: TrialRecord) -> str | None:
    return (
        f"trial {trial.origin.promoted_from} on all rows" if trial.origin.promoted_from is not None else None
    )


def does_not_fit(trial: TrialRecord) -> str | None:
    """A sentence that no technique makes the trial fit; a baseline is trained all the same."""
    plan = trial.plan.summary
    if plan is None or plan.fits:
        return None
    return f"does not fit the cluster it is planned for: {plan.remedy or plan.reason}"
