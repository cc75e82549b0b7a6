"""What a study has to say of its minutes: what ended the search, and what there was no time for."""

from __future__ import annotations

import math
from statistics import median

from dashboards.sentences.winners import confirm_command, diverged
from dashboards.units import decimals, duration
from trials.record import TrialKind, TrialRecord
from trials.study_record import ExpectedGain, StudyRecord, covered_seconds

MOST_SEEDS = 5
"""Number of seeds from which `dhen-search confirm` retrains winners by default."""

TRAININGS_TO_BEGIN_WITH = 12
"""Minutes, in trainings of the baseline, that leave its tuning and a few candidates their time: at most half is
the baseline's, and half of the rest at least the search's (docs/decisions/0029-minutes.md)."""
SPENT_ON = {
    TrialKind.BASELINE: "the baseline",
    TrialKind.CANDIDATE: "candidates",
    TrialKind.DISTILLED: "learning from an average",
}
"""What time was spent on, by kind of trial; averages take none but scores."""
NO_TIME_TO_DISTIL = "No network learnt from the best average, for want of time; with distil=yes some do."
"""What a study says whose minutes leave no time for distillation."""


def search_ended(record: StudyRecord) -> str | None:
    """Why the search ended before its budget was spent; None where it did not."""
    gain = record.expected_gain
    if gain is None:
        return None
    return (
        f"The search ended after {gain.candidates} candidates with a result: {gain.more} more were expected to "
        f"lower the best NE by {decimals(gain.percent, 2)} %, {_against(gain)}. "
        f"The same command {'without worth= and ' if gain.worth_percent is not None else ''}with "
        "search_until=none goes on."
    )


def no_candidate(record: StudyRecord) -> str:
    """Returns the sentence that no candidate has ended, or how many minutes would do where there were too few."""
    took = [
        trial.result.training_seconds
        for trial in record.trials
        if trial.kind is TrialKind.BASELINE and trial.result.training_seconds > 0.0
    ]
    if not record.finished or record.seconds_budget is None or not took:
        return "No candidate has ended yet."
    one = median(took)
    minutes = max(math.ceil(TRAININGS_TO_BEGIN_WITH * one / 60.0), math.ceil(record.seconds_budget / 30.0))
    return (
        f"The minutes were over before a candidate could train: a training of the baseline takes {duration(one)}; "
        f"the same command with minutes={minutes} goes on and has time for some."
    )


def outlasted(record: StudyRecord) -> str | None:
    """Returns the sentence on trainings that had no time: those that were not begun, and those that were stopped.
    None if there are none."""
    unbegun = [trial for trial in record.trials if trial.result.not_begun]
    parts = []
    if unbegun:
        baselines = sum(trial.kind is TrialKind.BASELINE for trial in unbegun)
        of_baseline = f", {baselines} of them the baseline's" if baselines else ""
        some = "1 training was" if len(unbegun) == 1 else f"{len(unbegun)} trainings were"
        parts.append(f"{some} not begun{of_baseline}")
    parts += (
        f"trial {trial.number} was stopped after {trial.result.measured.cut_after:,} examples and counts with its "
        "NE there"
        for trial in record.trials
        if trial.result.measured.cut_after is not None and not trial.shared
    )
    return f"For want of time {'; '.join(parts)}." if parts else None


def where_minutes_went(record: StudyRecord) -> str | None:
    """Returns the sentence on what a study with minutes has spent them on, once it is finished; None before. What
    was retrained later (`dhen-search confirm`) is none of its minutes."""
    if not record.finished or record.seconds_budget is None:
        return None
    stages: dict[str, list[TrialRecord]] = {}
    for trial in (*record.trials, *record.retrainings):
        if trial.shared or trial.kind is TrialKind.AVERAGE or _came_later(trial, record):
            continue
        stages.setdefault(_spent_on(trial, record), []).append(trial)
    took = {name: seconds for name, some in stages.items() if (seconds := covered_seconds(some)) >= 0.05}
    rest = record.elapsed_seconds - sum(took.values())
    if not took or rest < 0.0:
        return None
    each = [f"{duration(seconds)} on {name}" for name, seconds in (*took.items(), ("all else", rest))]
    return f"Of its {duration(record.elapsed_seconds)} the study has spent {', '.join(each)}."


def _came_later(trial: TrialRecord, record: StudyRecord) -> bool:
    """Tells whether this is a retraining that began after the study had ended."""
    ended, began = record.finished_at, trial.origin.started_at
    return trial.kind is TrialKind.RETRAINING and ended is not None and began is not None and began > ended


def _spent_on(trial: TrialRecord, record: StudyRecord) -> str:
    """Returns what a trial or a retraining was for."""
    if trial.origin.promoted_from is not None:
        return "trainings on all rows"
    if trial.kind is not TrialKind.RETRAINING:
        return SPENT_ON[trial.kind]
    if trial.job.origin is not None:
        return "earlier periods"
    if trial.number in {number for refit in record.refits for number in refit.networks}:
        return "training winners once more"
    return "retrainings from other seeds"


def fewer_seeds(record: StudyRecord) -> str | None:
    """From how few seeds winners of a study with minutes were confirmed, where more are usual; None otherwise."""
    seeds = min((len(comparison.seeds) for comparison in record.comparisons), default=MOST_SEEDS)
    if record.seconds_budget is None or seeds >= MOST_SEEDS:
        return None
    if diverged(record):  # that seed is not tried again
        return (
            f"Winners were retrained from {seeds} seeds, since trainings from others diverged; "
            f"`{confirm_command(record)} --seeds {2 * MOST_SEEDS}` tries further ones."
        )
    return (
        f"Winners were retrained from {seeds} seeds; `{confirm_command(record)}` adds others, up to {MOST_SEEDS}, "
        "which make intervals narrower."
    )


def fewer_winners(record: StudyRecord) -> str | None:
    """How few of the winners were confirmed, where there was no time for all; None where all were, or none."""
    if record.choice is None or record.seconds_budget is None:
        return None
    winners = {winner.trial for winner in record.choice.winners}
    confirmed = len(winners & {comparison.trial for comparison in record.comparisons})
    if confirmed in (0, len(winners)):
        return None
    return (
        f"For want of time {confirmed} of the {len(winners)} winners, the best first, "
        f"{'was' if confirmed == 1 else 'were'} confirmed; `{confirm_command(record)}` does the others."
    )


def no_time_for_averages(record: StudyRecord) -> str:
    """That averages were left out, and what makes them."""
    return f"No averages were made, for want of time; `dhen-search average {record.directory}` makes them."


def no_time_to_confirm(record: StudyRecord, seeds: int, seconds: float) -> str:
    """That winners were not confirmed, what that would have taken, and what does it."""
    return (
        f"Winners were not confirmed: the minutes have too little left for {seeds} seeds, which take about "
        f"{duration(seconds)}; `{confirm_command(record)}` does it."
    )


def no_time_to_refit(trained: int, winners: int) -> str:
    """Returns the sentence that so few of the winners were trained once more on validation too, and what trains
    all of them."""
    some = f"{trained} of the {winners} winners, the best first," if trained else "none of the winners"
    return (
        f"For want of time {some} {'was' if trained < 2 else 'were'} trained once more on training and validation "
        "together; with refit=yes all are."
    )


def _against(gain: ExpectedGain) -> str:
    """What the expected gain was held against: what is worth it, or what the log can show, whichever is more."""
    worth, detectable = gain.worth_percent or 0.0, gain.detectable_percent or 0.0
    if worth >= detectable:
        return f"and less than {decimals(worth, 2)} % is not worth it (worth=)"
    return f"and this log's validation rows show no difference below {decimals(detectable, 2)} %"
