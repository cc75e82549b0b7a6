"""Winners against the baseline, retrained from several seeds: the table and the verdict in words."""

from __future__ import annotations

from dashboards.names import counted_from_one, trial_name
from dashboards.sentences.choice import reasons
from dashboards.units import MISSING, decimals, percent, percent_range, si
from trials.analyses import Better
from trials.record import Outcome, TrialRecord
from trials.study_record import Comparison, StudyRecord, relative_ne_percent

COLUMNS = (
    "Trial",
    "Chosen as",
    "FLOPs",
    "NE on test",
    "Baseline",
    "Difference",
    "95 % interval",
    "p, Holm",
    "Detectable",
    "Better",
    "Model",
)
"""Titles of the columns of comparisons, on the page and in the terminal."""
LEFT = ("Chosen as", "Better", "Model")
"""Columns of words."""
VERDICTS = {
    Better.YES: "it is better than the baseline",
    Better.NO: "it is worse than the baseline",
    Better.CANNOT_TELL: "whether it is better than the baseline, this log cannot tell",
}


def rows(record: StudyRecord) -> list[tuple[str, ...]]:
    """Rows of the table, in order of FLOPs."""
    return [_cells(comparison, record) for comparison in record.comparisons]


def explanation(record: StudyRecord) -> str | None:
    """How the comparisons were made; None where there are none."""
    if not record.comparisons:
        return None
    first = record.comparisons[0]
    fewest = min(len(comparison.seeds) for comparison in record.comparisons)
    on = ", on the rows of training and validation together" if first.refit else ""
    lost = diverged(record)
    left_out = (
        f" Seeds from which a training diverged ({lost} of them) are left out: what is said is of the others."
        if lost
        else ""
    )
    return (
        f"Winners and baseline retrained from {fewest} seeds other than the study's{on}, each pair in the same "
        f"order of examples. Intervals are of NE on test relative to the baseline's, over seeds and "
        f"{first.blocks} blocks of rows by {first.blocked_by}. p is two-sided, after Holm's correction over "
        f"{first.winners}. Detectable: the difference that four of five such comparisons would have found."
        f"{left_out}"
    )


def diverged(record: StudyRecord) -> int:
    """Returns how many retrainings of winners and baseline from other seeds diverged, which no comparison has."""
    refit = any(comparison.refit for comparison in record.comparisons)
    return sum(
        trial.result.outcome is Outcome.DIVERGED
        for trial in record.retrainings
        if trial.job.origin is None
        and trial.origin.removed is None
        and (trial.job.refit is not None) == refit
    )


def verdict(comparison: Comparison) -> str:
    """What the comparison says of the best candidate, in words."""
    relative, seeds = percent(comparison.difference_percent), len(comparison.seeds)
    return (
        f"Retrained from {seeds} seeds, the best candidate's NE on the test split, which no choice has seen, is "
        f"{decimals(comparison.ne, 5)} against the baseline's {decimals(comparison.baseline_ne, 5)} ({relative}, "
        f"95 % interval {interval(comparison)}): {VERDICTS[comparison.better]}. "
        f"The smallest difference that this comparison could be expected to show is "
        f"{decimals(comparison.detectable_percent, 2)} %."
    )


def refitted(record: StudyRecord) -> str | None:
    """Returns a sentence on what the best has gained by learning from validation too; None where it has not."""
    refit = record.refit(record.best)
    if refit is None:
        return None
    before = record.trial(refit.trial).result.test
    change = f", {percent(relative_ne_percent(refit.test.ne, before.ne))} to before" if before else ""
    baseline = record.refit(record.baseline) if record.best != record.baseline else None
    beside = f", the baseline {decimals(baseline.test.ne, 5)}" if baseline else ""
    return (
        f"Trained once more, on the {refit.rows:,} rows of training and validation together, the best has NE "
        f"{decimals(refit.test.ne, 5)} on test{change}{beside}; the bundle has these weights."
    )


def better_line(record: StudyRecord, trial: TrialRecord) -> str:
    """The verdict in a line, or how to find out: `better than the baseline: yes, -0.41 % (95 % interval ...)`."""
    comparison = record.comparison(trial.number)
    if comparison is not None:
        difference = f"{percent(comparison.difference_percent)} (95 % interval {interval(comparison)})"
        return f"better than the baseline: {comparison.better}, {difference}"
    if trial.number == record.baseline:
        best = (
            ": no candidate is better beyond the noise of choosing" if record.best == record.baseline else ""
        )
        return f"it is the baseline{best}"
    if record.choice and trial.number not in [winner.trial for winner in record.choice.winners]:
        return "not confirmed: only the winners that were chosen are compared with the baseline"
    return f"not confirmed: {confirm_command(record)}"


def confirm_command(record: StudyRecord) -> str:
    """The command that compares the study's winners with the baseline."""
    return f"dhen-search confirm {record.directory}"


def interval(comparison: Comparison) -> str:
    """The interval of a comparison: `-0.41 to -0.12 %`."""
    return percent_range(comparison.low_percent, comparison.high_percent)


def retrained_line(retraining: TrialRecord) -> str:
    """A line for logs: `retrained trial 7 from seed 3: NE 0.78123 on test`."""
    ablation = f" without {counted_from_one(retraining.origin.removed)}" if retraining.origin.removed else ""
    rows = retraining.job.origin
    part = f" on the first {rows:,} rows" if rows is not None else ""
    if retraining.job.refit is not None:
        part = " on training and validation"
    about = f"retrained trial {retraining.origin.of}{ablation}{part} from seed {retraining.job.seed}"
    if retraining.result.outcome is not Outcome.COMPLETED:
        return f"{about}: {retraining.result.outcome}, {retraining.result.error}"
    split, metrics = "test", retraining.result.test
    if metrics is None and retraining.job.refit is not None:
        return about
    if metrics is None:
        split, metrics = "validation", retraining.result.validation
    return f"{about}: NE {decimals(metrics.ne, 5) if metrics else MISSING} on {split}"


def _cells(comparison: Comparison, record: StudyRecord) -> tuple[str, ...]:
    trial = record.trial(comparison.trial)
    return (
        str(comparison.trial),
        reasons(record, comparison.trial),
        si(trial.job.flops),
        decimals(comparison.ne, 5),
        decimals(comparison.baseline_ne, 5),
        percent(comparison.difference_percent),
        interval(comparison),
        _p(comparison.p_adjusted),
        f"{decimals(comparison.detectable_percent, 2)} %",
        comparison.better.value,
        trial_name(trial),
    )


def _p(value: float) -> str:
    return "<0.0001" if value < 1e-4 else decimals(value, 4)
