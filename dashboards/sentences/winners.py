"""The choice of the best and of winners, and winners against the baseline, retrained from several seeds: the
table and the verdict in words."""

from __future__ import annotations

import shlex

from dashboards.names import (
    MISSING,
    counted_from_one,
    decimals,
    percent,
    percent_range,
    ratio,
    si,
    trial_name,
)
from dashboards.rows import PlainTable, find, known_ne, winner_reasons
from trials.records.findings import WinnerVerdict
from trials.records.study_record import Comparison, StudyRecord, relative_ne_percent
from trials.records.trial_record import Outcome, TrialRecord

NO_OPTIMISM_PERCENT = 0.005
"""Percent of NE that are shown as 0.00."""
VERDICTS = {
    WinnerVerdict.YES: "it is better than the baseline",
    WinnerVerdict.NO: "it is worse than the baseline",
    WinnerVerdict.CANNOT_TELL: "whether it is better than the baseline, this log cannot tell",
}


def winners_table(record: StudyRecord) -> PlainTable:
    """Comparisons in order of FLOPs."""
    columns = (
        *("Trial", "Chosen as", "FLOPs", "NE on test", "Baseline", "Difference", "95 % interval", "p, Holm"),
        *("Detectable", "Better", "Model"),
    )
    reasons = winner_reasons(record)
    rows = []
    for each in record.comparisons:
        trial = record.trial(each.trial)
        row = (
            str(each.trial),
            ", ".join(reasons.get(each.trial, ())),
            si(trial.job.flops),
            decimals(each.ne, 5),
            decimals(each.baseline_ne, 5),
            percent(each.difference_percent),
            interval(each),
            "<0.0001" if each.p_adjusted < 1e-4 else decimals(each.p_adjusted, 4),
            f"{decimals(each.detectable_percent, 2)} %",
            each.better.value,
            trial_name(trial),
        )
        rows.append(row)
    return PlainTable(columns, rows, left=("Chosen as", "Better", "Model"))


def explanation(record: StudyRecord) -> str | None:
    """How the comparisons were made; None if there are none."""
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
    """Returns a sentence on what the best has gained by learning from validation too; None if it has not."""
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
    if record.choice and trial.number not in winner_reasons(record):
        return "not confirmed: only the winners that were chosen are compared with the baseline"
    return f"not confirmed: {confirm_command(record)}"


def confirm_command(record: StudyRecord) -> str:
    """The command that compares the study's winners with the baseline."""
    return f"dhen-search confirm {shlex.quote(record.directory)}"


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


def noise(record: StudyRecord) -> str | None:
    """Returns what choosing the lowest of several makes of its NE; None if it is not known, or nothing."""
    choice = record.choice
    if choice is None or not choice.judged or choice.compared < 2:
        return None
    if choice.optimism_percent < NO_OPTIMISM_PERCENT:
        return None
    return (
        f"Choosing the lowest NE of {choice.compared} makes it look about {_size(choice.optimism_percent)} "
        f"lower on validation than it is, by the spread over blocks of rows."
    )


def best_not_lowest(record: StudyRecord) -> str | None:
    """Why the best is not the lowest NE; None if it is, or no choice was made."""
    choice = record.choice
    if choice is None or choice.best == choice.lowest:
        return None
    best, lowest = find(record, choice.best), find(record, choice.lowest)
    judged, other = choice.of(choice.best), choice.of(choice.lowest)
    if best is None or lowest is None or judged is None or other is None:
        return None
    merits = []
    if other.worse_periods > judged.worse_periods:
        merits.append(
            f"it is worse than the baseline in {judged.worse_periods} of {choice.periods} periods, the lowest in "
            f"{other.worse_periods}"
        )
    if (best.job.flops or 0.0) < (lowest.job.flops or 0.0):
        merits.append(f"it has {ratio((best.job.flops or 0.0) / (lowest.job.flops or 1.0))} the FLOPs")
    periods = "an earlier period" if choice.origins == 1 else f"{choice.origins} earlier periods"
    where = f"validation and {periods}" if choice.origins else "validation"
    is_baseline = choice.best == choice.baseline
    why = "" if is_baseline or not merits else f", and {' and '.join(merits)}"
    return (
        f"The lowest NE on {where} is that of trial {lowest.number} ({trial_name(lowest)}): "
        f"{'the baseline' if is_baseline else f'trial {best.number}'} is worse by {_size(judged.percent)} "
        f"(standard error {_size(judged.standard_error)}), which is within the noise of choosing{why}."
    )


def baseline_is_best(record: StudyRecord) -> str:
    """Says that the baseline is the best, in place of the sentence that compares the best with it."""
    choice, baseline = record.choice, record.trial(record.baseline or 0)
    assert choice is not None
    ne = decimals(known_ne(baseline), 5)
    name = f"trial {baseline.number} ({trial_name(baseline)})"
    about = f"the best is the baseline itself, {name}, NE {ne} on validation"
    if choice.lowest == choice.baseline:
        return f"None is better than the tuned baseline: {about}."
    beyond = f"beyond what choosing among {choice.compared} explains"
    return f"None is better than the tuned baseline {beyond}: {about}."


def winners_chosen(record: StudyRecord) -> str | None:
    """Which winners are scored on test, and what for; None before they are chosen."""
    winners = winner_reasons(record)
    if not winners:
        return None
    named = "; ".join(f"trial {number} ({', '.join(reasons)})" for number, reasons in winners.items())
    return f"Chosen before test was looked at, and scored there beside the baseline: {named}."


def _size(value: float) -> str:
    return percent(value).lstrip("+")
