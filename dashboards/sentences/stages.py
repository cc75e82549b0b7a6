"""What single stages of a study have to say, a sentence each: where it was started from, what was over a limit,
what its last stage has tuned, how the ranking on a part of the log held on all of it, what its minutes were
for."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

from dashboards.names import byte_size, decimals, duration, milliseconds, percent, short_name, si
from dashboards.rows import find, known_ne, winner_reasons
from dashboards.sentences.winners import confirm_command, diverged
from trials.records.study_record import (
    FoundPasses,
    StudyRecord,
    covered_seconds,
    relative_ne_percent,
)
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

MOST_SEEDS = 5
"""Number of seeds from which `dhen-search confirm` retrains winners by default."""

TRAININGS_TO_BEGIN_WITH = 12
"""Minutes, in trainings of the baseline, that leave its tuning and a few candidates their time: at most half is
the baseline's, and half of the rest at least the search's (docs/decisions/0027-minutes.md)."""
SPENT_ON = {
    TrialKind.BASELINE: "the baseline",
    TrialKind.CANDIDATE: "candidates",
    TrialKind.DISTILLED: "learning from an average",
}
"""What time was spent on, by kind of trial; averages take none but scores."""
NO_TIME_TO_DISTIL = "No network learnt from the best average, for want of time; with distil=yes some do."
"""What a study says whose minutes leave no time for distillation."""
SHOWN = 3
"""Number of reasons of each kind that are named: the most frequent ones."""
LEAST_RANKED = 3
"""Number of trials of which two rankings can agree or not; with two they agree wholly or not at all."""


def warm_starts(record: StudyRecord) -> list[str]:
    """What was reused of each earlier study, and why the rest was not."""
    said = []
    for study in record.earlier:
        seeds = f" (seed {study.seed}, here {record.seed})" if study.seed != record.seed else ""
        about = f"Warm start: {study.reused} of {study.candidates} candidates of {study.directory}{seeds}"
        left = []
        for kind, reasons in study.left.items():
            named = [f"{reason} x {count}" for reason, count in Counter(reasons).most_common(SHOWN)]
            if len(reasons) == 1:
                named = list(reasons)
            elif len(reasons) > SHOWN:
                named.append(f"and {len(reasons) - SHOWN} other reasons")
            left.append(f"{sum(reasons.values())} {kind} ({'; '.join(named)})")
        said.append("; ".join([about, ", ".join(left)] if left else [about]) + ".")
    return said


def proposed(record: StudyRecord) -> list[str]:
    """Which candidates were proposed from outside, by whom, and what came of them; which lines were refused, and
    why."""
    trials = [trial for trial in record.candidates if trial.origin.proposal is not None]
    if not trials and not record.refused:
        return []
    credits = []
    for trial in trials:
        assert trial.origin.proposal is not None
        ne = _ne(trial)
        came_to = f"NE {decimals(ne, 5)}" if ne is not None else trial.result.outcome.value.replace("_", " ")
        outside = ", outside the space" if trial.origin.proposal.outside else ""
        front = ", on the front" if trial.number in record.front else ""
        credits.append(f"trial {trial.number}{trial.origin.proposal.by_words}, {came_to}{outside}{front}")
    said = [f"Proposals from outside that were taken: {'; '.join(credits) or 'none'}."]
    said += (
        f"Proposal {refusal.line}{refusal.by_words} was not trained: {refusal.reason}"
        for refusal in record.refused
    )
    return said


def over_limits(record: StudyRecord) -> str | None:
    """How many candidates are over a limit of serving or of table bytes; if all are, the least seen of each
    limited quantity."""
    judged = [trial for trial in record.candidates if trial.plan.serving_excess is not None]
    over = sum((trial.plan.serving_excess or 0.0) > 0 for trial in judged)
    if not over:
        return None
    if over < len(judged):
        limits = " or the ".join(record.limits.words)
        return f"{over} of {len(judged)} candidates are over the {limits} and were not trained."
    # the least seen of each limited quantity; only candidates within the other limits have a time
    least, serving = [], record.serving
    times = [trial.plan.serving_ms for trial in judged if trial.plan.serving_ms is not None]
    if times:
        least.append(f"the fastest takes {milliseconds(min(times))}")
    if serving.max_bytes is not None:
        smallest = min(trial.job.weights_bytes or 0 for trial in judged)
        least.append(f"the smallest has {byte_size(smallest)} of weights")
    if serving.max_flops is not None:
        cheapest = min(trial.job.flops or 0.0 for trial in judged)
        least.append(f"the cheapest needs {si(cheapest)} FLOPs per example")
    if record.max_table_bytes is not None:
        smallest = min(trial.job.table_bytes or 0 for trial in judged)
        least.append(f"the smallest has {byte_size(smallest)} of embedding tables")
    return (
        f"No candidate meets the {' and the '.join(record.limits.words)}: of {len(judged)} that were seen, "
        f"{', '.join(least)}. Raise the limits, or search a space with smaller models."
    )


def tuned(record: StudyRecord) -> str | None:
    """First NE and lowest tuned NE of each architecture; None if none was tuned."""
    by_first: dict[int, list[TrialRecord]] = {}
    for trial in record.candidates:
        if trial.origin.tuned_from is not None:
            by_first.setdefault(trial.origin.tuned_from, []).append(trial)
    gains = []
    for number, trials in by_first.items():
        first = find(record, number)
        before, done = _ne(first), [(ne, trial.number) for trial in trials if (ne := _ne(trial)) is not None]
        if first is None or before is None or not done:
            continue
        ne, best = min(done)
        count = f"{len(trials)} trial" + "s" * (len(trials) > 1)
        about = f"trial {number} ({short_name(first.job.model)})"
        if ne >= before:
            gains.append(f"{about} stays at NE {decimals(before, 5)} ({count}, none better)")
            continue
        relative = percent(relative_ne_percent(ne, before))
        change = f"from NE {decimals(before, 5)} to {decimals(ne, 5)}"
        gains.append(f"{about} {change} ({relative}, trial {best}; {count})")
    return f"Training settings tuned again: {'; '.join(gains)}." if gains else None


def passes_found(record: StudyRecord) -> str | None:
    """How many passes trainings have and what showed it; None if the number was given, or is not yet known."""
    found = record.passes
    if found is None:
        return None
    about = f"Trainings have {number_of_passes(found)} over the training rows"
    if found.reason is not None:
        return f"{about}: {found.reason}; training.epochs= sets another number for a new study."
    lowest = f"{decimals(found.lowest_ne, 5)} after {decimals(found.lowest_after, 1)} of up to {found.tried}"
    if found.falling is not None:
        lowest += f" at constant rates and {decimals(found.falling_ne, 5)} with falling ones"
    if found.decays:
        settings = " ".join(f"training.{key}={value:g}" for key, value in found.decays.items())
        lowest += f", with {settings}"
    within_one = f"{decimals(found.first_ne, 5)} within one pass"
    if found.passes > 1:
        return f"{about}: with the baseline, NE on validation was {within_one} and {lowest}."
    return (
        f"{about}: further ones did not help the baseline (NE on validation {within_one}, lowest {lowest})."
    )


def decay_left_out(technique: str) -> str:
    """A sentence on the decay that a study or a training does not try because of a technique."""
    return (
        f"training.table_decay is left out of what is tried: a network that {technique} holds could not be held "
        "with it."
    )


def number_of_passes(found: FoundPasses) -> str:
    """`one pass`, `up to 6 passes` or `2 passes, with learning rates that fall to zero,`."""
    if found.falling is not None:
        return f"{found.falling} passes, with learning rates that fall to zero,"
    return "one pass" if found.passes == 1 else f"up to {found.passes} passes"


def promotion(record: StudyRecord) -> str | None:
    """What came of the promotion, in words; None if all trials were trained on all rows."""
    searched = (trial for trial in record.trials if trial.origin.promoted_from is None)
    fraction = next(
        (f for trial in searched if (f := trial.job.training.get("train_fraction")) is not None), None
    )
    if fraction is None:
        return None
    rows = record.log.rows.get("train", 0)
    part = f"The search trained on the last {round(fraction * rows):,} of {rows:,} training rows"
    done = [trial for trial in record.promoted if trial.result.outcome is Outcome.COMPLETED]
    if not record.promoted:
        return f"{part}; when it is over, the front and the baseline are trained on all of them."
    best = min((trial for trial in done if trial.kind is TrialKind.CANDIDATE), key=_ne_or_nan, default=None)
    if best is None or record.baseline not in {trial.number for trial in done}:
        return f"{part}; of the front and the baseline {len(done)} have been trained on all of them so far."
    field = [record.trial(_source(trial)) for trial in done if trial.kind is TrialKind.CANDIDATE]
    front = "candidate" if len(field) == 1 else f"{len(field)} candidates"
    first, before = best.origin.promoted_from, min(field, key=_ne_or_nan).number
    source = f"trial {first} of the search, whose own best was {before}"
    if before == first:
        source = f"the search's own best, trial {before}"
    return (
        f"{part}; the front's {front} and the baseline were then trained on all of them, and what is said here is "
        f"of these. {_tau(done, record)}The best of them on all rows is {source}."
    )


def _tau(done: list[TrialRecord], record: StudyRecord) -> str:
    """Kendall's tau between NE on a part of the log and on all of it; empty if it is not defined."""
    if len(done) < LEAST_RANKED:
        return ""
    from scipy.stats import kendalltau  # a second of imports that other studies need not wait for

    part, whole = zip(
        *[(_ne_or_nan(record.trial(_source(trial))), _ne_or_nan(trial)) for trial in done], strict=True
    )
    tau = float(kendalltau(part, whole).statistic)
    if math.isnan(tau):
        return ""
    return f"Kendall tau between both rankings is {decimals(tau, 2)}. "


def _source(trial: TrialRecord) -> int:
    assert trial.origin.promoted_from is not None
    return trial.origin.promoted_from


def _ne(trial: TrialRecord | None) -> float | None:
    """NE on validation of a trial that completed, if it is known and finite."""
    return known_ne(trial) if trial is not None and trial.result.outcome is Outcome.COMPLETED else None


def _ne_or_nan(trial: TrialRecord) -> float:
    return trial.result.validation.ne if trial.result.validation else math.nan


def search_ended(record: StudyRecord) -> str | None:
    """Why the search ended before its budget was spent; None if it did not."""
    gain = record.expected_gain
    if gain is None:
        return None
    # what the gain was held against: what is worth it, or what the log can show, whichever is more
    worth, detectable = gain.worth_percent or 0.0, gain.detectable_percent or 0.0
    against = f"this log's validation rows show no difference below {decimals(detectable, 2)} %"
    if worth >= detectable:
        against = f"less than {decimals(worth, 2)} % is not worth it (worth=)"
    return (
        f"The search ended after {gain.candidates} candidates with a result: {gain.more} more were expected to "
        f"lower the best NE by {decimals(gain.percent, 2)} %, and {against}. "
        f"The same command {'without worth= and ' if gain.worth_percent is not None else ''}with "
        "search_until=none goes on."
    )


def no_candidate(record: StudyRecord) -> str:
    """Returns the sentence that no candidate has ended, or how many minutes would do if there were too few."""
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
    refitted = {number for refit in record.refits for number in refit.networks}
    for trial in (*record.trials, *record.retrainings):
        retrained, began = trial.kind is TrialKind.RETRAINING, trial.origin.started_at
        came_later = retrained and record.finished_at and began and began > record.finished_at
        if trial.shared or trial.kind is TrialKind.AVERAGE or came_later:
            continue
        if trial.origin.promoted_from is not None:
            spent_on = "trainings on all rows"
        elif not retrained:
            spent_on = SPENT_ON[trial.kind]
        elif trial.job.origin is not None:
            spent_on = "earlier periods"
        elif trial.number in refitted:
            spent_on = "training winners once more"
        else:
            spent_on = "retrainings from other seeds"
        stages.setdefault(spent_on, []).append(trial)
    took = {name: seconds for name, some in stages.items() if (seconds := covered_seconds(some)) >= 0.05}
    rest = record.elapsed_seconds - sum(took.values())
    if not took or rest < 0.0:
        return None
    each = [f"{duration(seconds)} on {name}" for name, seconds in (*took.items(), ("all else", rest))]
    return f"Of its {duration(record.elapsed_seconds)} the study has spent {', '.join(each)}."


def fewer_seeds(record: StudyRecord) -> str | None:
    """From how few seeds winners of a study with minutes were confirmed, if more are usual; None otherwise."""
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
    """How few of the winners were confirmed, if there was no time for all; None if all were, or none."""
    if record.seconds_budget is None:
        return None
    winners = winner_reasons(record)
    confirmed = len(winners.keys() & {comparison.trial for comparison in record.comparisons})
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
