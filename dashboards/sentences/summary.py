"""A study in plain sentences: what was found, how near the limit it is, what went wrong; and as a note in
Markdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import mean, median

from dashboards.edges import on_the_edge, widened
from dashboards.names import (
    IN_WORDS,
    MISSING,
    byte_size,
    decimals,
    known,
    percent,
    ratio,
    short_name,
    si,
    trial_name,
)
from dashboards.plans import overall_accuracy, share, signed
from dashboards.rows import does_not_fit, find, known_ne, relative_percent, trial_rows
from dashboards.sentences.stages import (
    decay_left_out,
    fewer_seeds,
    fewer_winners,
    no_candidate,
    outlasted,
    over_limits,
    passes_found,
    promotion,
    proposed,
    search_ended,
    tuned,
    warm_starts,
    where_minutes_went,
)
from dashboards.sentences.winners import (
    baseline_is_best,
    best_not_lowest,
    confirm_command,
    interval,
    noise,
    refitted,
    verdict,
    winners_chosen,
)
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import Metrics, Outcome, TrialKind, TrialRecord

LinkTo = Callable[[int | None], str | None]
NOTE_COLUMNS = (
    "Trial",
    "NE on validation",
    "against the baseline",
    "95 % interval on test",
    "FLOPs",
    "technique",
)
MOST_CHARACTERS = 5000
"""Length that MLflow allows; what is said last is left out first."""
SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+!|~&$-])")
RULE = ("---",) * len(NOTE_COLUMNS)
LEAST_WITH_A_KNEE = 3
"""Number of trials on a front from which it can bend somewhere."""
_UNFINISHED = tuple(outcome for outcome in Outcome if outcome.unfinished)
"""Looked up once: names of an enumeration take longer to look up than thousands of trials to compare with."""


def sentences(record: StudyRecord) -> tuple[str, ...]:
    """Sentences from the most important down; only what the record knows."""
    best, baseline = find(record, record.best), find(record, record.baseline)
    unfit = does_not_fit(baseline) if baseline else None
    failed = next((trial for trial in record.trials if trial.result.error), None)
    drafts = (
        _best(best, baseline, record),
        _objective(record),
        best_not_lowest(record),
        noise(record),
        _knee(record, baseline),
        widened(record),
        on_the_edge(record),
        passes_found(record),
        decay_left_out(record.undecayed_under) if record.undecayed_under else None,
        search_ended(record),
        tuned(record),
        promotion(record),
        _averages(record, best),
        _distilled(record),
        _floor(record, best, baseline, "validation"),
        winners_chosen(record),
        _test(best, baseline, record),
        refitted(record),
        fewer_winners(record),
        fewer_seeds(record),
        _floor(record, best, baseline, "test"),
        *proposed(record),
        *warm_starts(record),
        _outcomes(record),
        where_minutes_went(record),
        outlasted(record),
        _stopped(record),
        _techniques(record),
        _forced(record),
        _predictions(record),
        over_limits(record),
        f"Warning: the baseline {unfit}" if unfit else None,
        f"Trial {failed.number}: {failed.result.error}" if failed and best is None else None,
    )
    return tuple(draft for draft in drafts if draft)


def progress(record: StudyRecord) -> str:
    """How far a study is, and whether it goes on: `finished, 30 of 30 candidates`."""
    state = "finished" if record.finished else "running" if record.running else "not running"
    budget = f" of {record.trials_budget}" if record.trials_budget is not None else ""
    done = len(ended(record.candidates))
    return f"{state}, {done}{budget} candidate{'s' if budget or done != 1 else ''}"


def ended(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Trials that have ended; one that was cut short runs again."""
    return [trial for trial in trials if trial.result.outcome not in _UNFINISHED]


def _best(best: TrialRecord | None, baseline: TrialRecord | None, record: StudyRecord) -> str:
    if best is None or known_ne(best) is None:
        return _no_result(record) if ended(record.candidates) else no_candidate(record)
    about = f"The best candidate, trial {best.number} ({trial_name(best)}), has NE {_ne(best)} on validation"
    relative = relative_percent(known_ne(best), known_ne(baseline))
    if baseline is None or relative is None:
        return f"{about}; there is no baseline yet to compare it with."
    if best.number == baseline.number:
        return baseline_is_best(record)
    against = f"trial {baseline.number} ({trial_name(baseline)}, NE {_ne(baseline)})"
    return f"{about}: {_side(relative)} the tuned baseline, {against}{_flops(best, baseline)}."


def _objective(record: StudyRecord) -> str | None:
    """Returns a sentence on what is scored, if that is not the splits by networks as they were trained."""
    if record.period is None:
        return None
    length = f"{int(record.period):,} rows" if record.period.strip().isdigit() else record.period
    return (
        f"NE is of periods of {length}, each scored before the network was trained on it "
        "(objective=next_period); curves are of validation as it was scored during training, all at once."
    )


def _no_result(record: StudyRecord) -> str:
    """A sentence that no candidate has a result, with the memory that the nearest would need if none fits."""
    trials, cluster = ended(record.candidates), record.cluster
    lacking = {
        trial.plan.memory_excess: trial for trial in trials if trial.result.outcome is Outcome.INFEASIBLE
    }
    excesses = [excess for excess in lacking if excess is not None and excess > 0]
    if (
        cluster is None
        or len(excesses) < len(lacking)
        or any(trial.result.outcome is not Outcome.INFEASIBLE for trial in trials)
    ):
        return "No candidate has a result."
    nearest = lacking[min(excesses)]
    needed = byte_size(math.ceil((1 + min(excesses)) * cluster.hbm))
    return (
        f"No candidate has a result: none of {len(trials)} fits {byte_size(cluster.hbm)} per rank. Trial "
        f"{nearest.number} ({short_name(nearest.job.model)}) comes nearest, with {needed}. Another space, more "
        "memory (hbm=), more ranks or a smaller training.batch_size would let some fit."
    )


def _side(relative: float) -> str:
    if abs(relative) < 0.005:
        return "level with"
    return f"{abs(relative):.2f} % {'below' if relative < 0 else 'above'}"


def _flops(trial: TrialRecord, baseline: TrialRecord) -> str:
    if not trial.job.flops or not baseline.job.flops:
        return ""
    times = ratio(trial.job.flops / baseline.job.flops)
    return f", at {times} its FLOPs ({si(trial.job.flops)} against {si(baseline.job.flops)} per example)"


def _knee(record: StudyRecord, baseline: TrialRecord | None) -> str | None:
    knee = find(record, record.knee)
    if knee is None or knee.result.validation is None or record.best is None:
        return None
    if record.knee == record.best:
        if len(record.front) < LEAST_WITH_A_KNEE:
            return None
        return "It is also the knee of the front, where more FLOPs stop paying."
    relative, difference = "", relative_percent(known_ne(knee), known_ne(baseline))
    if baseline is not None and difference is not None:
        if difference >= 0 and (knee.job.flops or 0.0) >= (baseline.job.flops or 0.0):
            return None  # who has the baseline has no use for it
        relative = f", {_side(difference)} the baseline{_flops(knee, baseline)}"
    about = f"trial {knee.number} ({trial_name(knee)}), has NE {_ne(knee)}"
    return f"The knee of the front, where more FLOPs stop paying, {about}{relative}."


def _averages(record: StudyRecord, best: TrialRecord | None) -> str | None:
    """What averages gain over single networks, if there are averages on the front."""
    averages = [
        trial for trial in record.trials if trial.kind is TrialKind.AVERAGE and trial.number in record.front
    ]
    if not averages or best is None:
        return None
    networks = [
        trial
        for trial in record.field
        if trial.result.outcome is Outcome.COMPLETED and trial.result.validation
    ]
    alone = min(networks, key=lambda trial: trial.result.validation.ne if trial.result.validation else 0.0)
    cost = (
        f", at {ratio(alone.job.flops / best.job.flops)} the FLOPs of the best"
        if alone.job.flops and best.job.flops
        else ""
    )
    are = "1 is an average" if len(averages) == 1 else f"{len(averages)} are averages"
    return (
        f"Of the {len(record.front)} on the front {are}: the mean of what several networks predict, at the FLOPs "
        f"of all of them. The lowest NE of one candidate is {_ne(alone)} (trial {alone.number}{cost}). "
        f"Averages are chosen among many on validation, where they look a little better than they are."
    )


def _distilled(record: StudyRecord) -> str | None:
    """What networks have gained by learning from an average, if some have."""
    pairs = [
        (trial, record.trial(trial.origin.distilled_from))
        for trial in record.trials
        if trial.origin.distilled_from is not None and trial.result.validation
    ]
    changes = [
        change
        for trial, before in pairs
        if (change := relative_percent(known_ne(trial), known_ne(before))) is not None
    ]
    if not changes:
        return None
    on_front = sum(trial.number in record.front for trial, _ in pairs)
    learnt = "1 network learnt" if len(changes) == 1 else f"{len(changes)} networks learnt"
    return (
        f"{learnt} from trial {pairs[-1][0].origin.teacher}, an average, on labels that are half its predictions: "
        f"at the same FLOPs NE is {_side(median(changes))} what it was before (median); on the front: {on_front}."
    )


def _floor(
    record: StudyRecord, best: TrialRecord | None, baseline: TrialRecord | None, split: str
) -> str | None:
    """How near baseline and best came to the lowest reachable NE, in percent, and how much of the gap closed."""
    floor = (record.log.ne_floor or {}).get(split)
    before, after = _metrics(baseline, split), _metrics(best, split)
    if best is not None and record.best == record.baseline:
        return None  # there is no candidate's way to the floor to tell of
    if floor is None or before is None or after is None or not known(before.ne) or not known(after.ne):
        return None
    gap, won = before.ne - floor, before.ne - after.ne
    closed = f", {100 * won / gap:.0f} % of the gap closed" if gap > 0 and won > 0 else ""
    far, near = (_side(relative_ne_percent(metrics.ne, floor)) for metrics in (before, after))
    return (
        f"No model can go below NE {decimals(floor, 5)} on {split}: the baseline is {far} that floor, the best "
        f"candidate {near}{closed}."
    )


def _metrics(trial: TrialRecord | None, split: str) -> Metrics | None:
    if trial is None:
        return None
    return trial.result.test if split == "test" else trial.result.validation


def _test(best: TrialRecord | None, baseline: TrialRecord | None, record: StudyRecord) -> str | None:
    """NE on test: from several seeds if the best was confirmed, else from the one training selected."""
    comparison = record.comparison(record.best)
    if comparison is not None:
        return verdict(comparison)
    after, before = _metrics(best, "test"), _metrics(baseline, "test")
    if after is None:
        return None
    unseen = "On the test split, which no choice has seen, the"
    if record.best == record.baseline:
        return f"{unseen} baseline has NE {decimals(after.ne, 5)}."
    best_ne = f"{unseen} best candidate has NE {decimals(after.ne, 5)}"
    if before is None:
        return f"{best_ne}."
    relative = percent(relative_ne_percent(after.ne, before.ne))
    against = f"against the baseline's {decimals(before.ne, 5)} ({relative})"
    return f"{best_ne} {against}, each trained once; whether it is better: {confirm_command(record)}."


def _outcomes(record: StudyRecord) -> str | None:
    trials = [trial for trial in record.trials if trial.kind is not TrialKind.AVERAGE]
    counts = Counter(trial.result.outcome for trial in trials)
    listed = ", ".join(f"{counts[outcome]} {IN_WORDS[outcome]}" for outcome in Outcome if counts[outcome])
    shared = sum(trial.origin.reused_from is not None for trial in record.trials)
    reuse = f" {shared} shared the result of an equal network." if shared else ""
    elsewhere = sum(trial.origin.reused_from_study is not None for trial in record.trials)
    reuse += f" {elsewhere} had been trained by earlier studies." if elsewhere else ""
    plural = "trial" if len(trials) == 1 else "trials"
    return f"{len(trials)} {plural}, the baseline's included: {listed}.{reuse}" if trials else None


def _stopped(record: StudyRecord) -> str | None:
    """What stopping saved, if stopped candidates had needed as many examples as completed ones did on average."""
    stopped = _examples(record, Outcome.STOPPED)
    completed = _examples(record, Outcome.COMPLETED) if stopped else []
    if not stopped or not completed:
        return None
    otherwise = mean(completed) * len(stopped)
    were = "1 candidate was" if len(stopped) == 1 else f"{len(stopped)} candidates were"
    left = 100 * (sum(stopped) + sum(completed)) / (otherwise + sum(completed))
    return (
        f"{were} stopped early: {si(sum(stopped))} examples trained in place of about {si(otherwise)}, so that "
        f"the candidates took about {left:.0f} % of the examples that they would have taken."
    )


def _examples(record: StudyRecord, outcome: Outcome) -> list[int]:
    """Examples that each candidate with this outcome was trained on in this study."""
    trials = [trial for trial in record.candidates if trial.result.outcome is outcome]
    return [trial.result.curve[-1].examples for trial in trials if trial.result.curve and not trial.shared]


def _techniques(record: StudyRecord) -> str | None:
    """How often each memory technique was planned, and each shape if there are several; nothing if plain DP
    in one shape on this machine does for all."""
    planned = [trial for trial in record.candidates if trial.plan.summary is not None]
    counts = Counter(trial.plan.unsized_technique for trial in planned)
    cluster = record.cluster
    if cluster is None or not planned:
        return None
    if cluster.name == "this" and set(counts) == {"dp"} and not cluster.shapes:
        return None
    size = f"{cluster.ranks_words} of {byte_size(cluster.hbm)}"
    doubt = "" if cluster.verified else ", numbers unverified"
    without_fit = counts.pop(None, 0)
    chosen = [f"{name} for {count}" for name, count in counts.most_common()]
    chosen += [f"no technique makes {without_fit} fit"] if without_fit else []
    shapes = Counter(trial.plan.ranks for trial in planned if trial.plan.technique is not None)
    took = [f"{shapes[shape]} on {shape}" for shape in cluster.shapes if shapes[shape]]
    in_shapes = f" Ranks: {', '.join(took)}." if took else ""
    techniques = f"{', '.join(chosen)} of {len(planned)} candidates"
    return f"Planned for {cluster.name} ({size}{doubt}): {techniques}.{in_shapes}"


def _forced(record: StudyRecord) -> str | None:
    """What was asked of all plans, so that candidates are not held as they would be; None if nothing was."""
    plan = next((trial.first_plan for trial in record.trials if trial.first_plan is not None), None)
    if plan is None or not plan.forced:
        return None
    forced = []
    if plan.restricted_to:
        forced.append(f"the ladder is restricted to technique={plan.restricted_to}")
    if plan.memory_margin:
        change = "added to" if plan.memory_margin > 0 else "taken off"
        forced.append(
            f"{byte_size(abs(plan.memory_margin))} are {change} every predicted peak (memory_margin)"
        )
    return f"Forced: {', and '.join(forced)}."


def _predictions(record: StudyRecord) -> str | None:
    """Predicted against measured, if both are known, and what ran out of memory all the same."""
    overall = overall_accuracy(record)
    if overall is None:
        return None
    compared = {"peaks are": overall.peak, "step times are": overall.step}
    lines = [
        f"Measured {name} off from predicted ones by {share(errors.median)} (median of {errors.count}), "
        f"{signed(errors.worst)} at worst."
        for name, errors in compared.items()
        if errors.count
    ]
    if overall.out_of_memory:
        many = overall.out_of_memory > 1
        ran = f"{overall.out_of_memory} training{'s' if many else ''} ran out of memory"
        tried = "each tried again" if many else "and was tried again"
        lines.append(f"{ran}, {tried} one technique up if there was one.")
    return " ".join(lines) or None


def _ne(trial: TrialRecord) -> str:
    return decimals(known_ne(trial), 5)


def study_note(record: StudyRecord, link_to: LinkTo, views: Mapping[str, str]) -> str:
    """Returns what was found in sentences, the front as a table, and links, in Markdown, as MLflow shows it beside
    the study's run.

    Args:
        record: the study.
        link_to: gives the address of a trial's run, or of the study's run for None.
        views: addresses of pages of the study's runs, by what they show.
    """
    first, *further = map(_escaped, sentences(record))
    study = link_to(None)
    report = [f"[the report]({study}/artifacts/report.html)"] if study else []
    pages = ", ".join([*report, *(f"[{shows}]({link})" for shows, link in views.items())])
    end = f"See {pages}. dhen-search writes this note anew as the study goes on."
    shown = [row for row in trial_rows(record) if row.trial.number in (*record.front, record.baseline)]
    shown.sort(key=lambda row: row.trial.job.flops or 0.0)
    rows = []
    for row in shown:
        trial, comparison = row.trial, record.comparison(row.trial.number)
        name, link = _escaped(f"#{trial.number} {trial_name(trial)}"), link_to(trial.number)
        marks = ", ".join(mark for mark in row.marks if mark != "front")
        cells = (
            (f"[{name}]({link})" if link else name) + (f" **{marks}**" if marks else ""),
            decimals(row.ne, 5),
            percent(row.relative_percent),
            interval(comparison) if comparison else MISSING,
            si(trial.job.flops),
            _escaped(trial.result.technique or MISSING),
        )
        rows.append(cells)

    def note() -> str:
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in (NOTE_COLUMNS, RULE, *rows)) if rows else ""
        parts = (f"**{_escaped(progress(record))}**", first, table, *further, end)
        return "\n\n".join(part for part in parts if part)

    while len(note()) > MOST_CHARACTERS and further:
        further.pop()
    while len(note()) > MOST_CHARACTERS and rows:
        rows.pop(0)  # the cheapest, which are the farthest from the best
    return note()


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is, names and words of users included."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
