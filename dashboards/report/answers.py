"""What the first screen of a report answers: how much better, at what cost, is it certain, does it fit, and
what to run next. Below are the facts of a study, by which two are compared, too."""

from __future__ import annotations

import shlex
from math import prod
from typing import NamedTuple

from dashboards.names import byte_size, decimals, known, milliseconds, percent, ratio, si, trial_name
from dashboards.rows import TrialRow, find, trial_rows
from dashboards.sentences.stages import number_of_passes
from dashboards.sentences.summary import ended
from dashboards.sentences.winners import confirm_command, interval
from trials.records.findings import WinnerVerdict
from trials.records.study_record import ClusterSummary, Comparison, StudyRecord
from trials.records.trial_record import TrialRecord

GOOD, BAD, OPEN = "good", "bad", "open"
VERDICTS = {
    WinnerVerdict.YES: ("Yes, better", GOOD),
    WinnerVerdict.NO: ("Yes, worse", BAD),
    WinnerVerdict.CANNOT_TELL: ("This log cannot tell", OPEN),
}


class Answer(NamedTuple):
    """One question with its answer."""

    question: str
    value: str
    detail: str
    tone: str = ""
    """`good`, `bad` or `open` if the answer is a verdict; what it is also stands in its words."""


class Answers(NamedTuple):
    """The first screen but for its figure and its commands."""

    headline: str
    model: str | None = None
    """The best's number and model in short."""
    number: int | None = None
    """The best's number."""
    answers: tuple[Answer, ...] = ()
    comparison: Comparison | None = None
    """The comparison whose interval is drawn beside the answer on certainty."""
    memory_share: float | None = None
    """Share of a rank's memory that the best is predicted to take, from 0 on."""


def answers(record: StudyRecord) -> Answers:
    """Returns what the record can answer of its best."""
    best, baseline = find(record, record.best), find(record, record.baseline)
    if best is None:
        if not record.trials:
            return Answers("No trial has started yet")
        return Answers(
            "No candidate has a result" if ended(record.candidates) else "No candidate has ended yet"
        )
    (row,) = trial_rows(record, (best,))
    comparison = telling_comparison(record)
    better, cost = _better(row, baseline, record), _cost(row, baseline, record)
    ends = (
        (comparison.low_percent, comparison.difference_percent, comparison.high_percent) if comparison else ()
    )
    cluster, plan = record.cluster, best.plan.summary
    share = None
    if cluster is not None and plan is not None and plan.peak_bytes is not None and cluster.hbm:
        share = plan.peak_bytes / cluster.hbm
    return Answers(
        headline=_headline(row, baseline),
        model=f"trial {best.number}, {trial_name(best)}",
        number=best.number,
        answers=(better, cost, _certain(comparison, record), _fits(best, record)),
        comparison=comparison if all(map(known, ends)) else None,
        memory_share=share,
    )


def telling_comparison(record: StudyRecord) -> Comparison | None:
    """Returns the best's comparison; if the baseline is the best, that of the winner with the lowest NE."""
    if record.best is not None and record.best == record.baseline:
        return min(record.comparisons, key=lambda compared: compared.difference_percent, default=None)
    return record.comparison(record.best)


def _headline(best: TrialRow, baseline: TrialRecord | None) -> str:
    relative = best.relative_percent
    if baseline is not None and best.trial.number == baseline.number:
        return "No candidate is better than the tuned baseline, beyond the noise of choosing"
    if relative is None:
        return f"NE {decimals(best.ne, 5)}, and no baseline yet to compare it with"
    times = _times(best.trial, baseline)
    at = f", at {times} its FLOPs" if times else ""
    if abs(relative) < 0.005:
        return f"Level with the tuned baseline{at}"
    side = "lower" if relative < 0 else "higher"
    return f"NE {abs(relative):.2f} % {side} than the tuned baseline's{at}"


def _times(best: TrialRecord, baseline: TrialRecord | None) -> str | None:
    if baseline is None or not best.job.flops or not baseline.job.flops:
        return None
    return ratio(best.job.flops / baseline.job.flops)


def _better(best: TrialRow, baseline: TrialRecord | None, record: StudyRecord) -> Answer:
    ne, question = f"NE {decimals(best.ne, 5)} on validation", "How much better?"
    if baseline is None or best.relative_percent is None:
        return Answer(question, decimals(best.ne, 5), f"{ne}; there is no baseline yet")
    if best.trial.number == baseline.number:
        return Answer(question, "0.00 %", f"{ne}: the baseline itself is the best", BAD)
    (against,) = trial_rows(record, (record.baseline_for(best.trial) or baseline,))
    detail = f"{ne} against the baseline's {decimals(against.ne, 5)}; lower is better"
    return Answer(
        question, percent(best.relative_percent), detail, GOOD if best.relative_percent < 0 else BAD
    )


def _cost(row: TrialRow, baseline: TrialRecord | None, record: StudyRecord) -> Answer:
    best, cheaper = row.trial, ""
    times, serving_ms = _times(best, baseline), best.plan.serving_ms
    other = baseline if baseline is not None and baseline.number != best.number else None
    # the knee beside a best that costs more
    knee = find(record, record.knee) if other else None
    if knee is not None and (knee.job.flops or 0.0) < (best.job.flops or 0.0):
        (knee_row,) = trial_rows(record, (knee,))
        if knee_times := _times(knee, baseline):
            cheaper = f"cheaper: trial {knee.number}, {percent(knee_row.relative_percent)} at {knee_times}"
    details = (
        f"{times} the baseline's {si(other.job.flops)}" if times and other else "",
        f"{si(best.job.parameters)} dense parameters" if best.job.parameters is not None else "",
        f"{byte_size(best.job.weights_bytes)} of weights" if best.job.weights_bytes is not None else "",
        f"{milliseconds(serving_ms)} for a request" if serving_ms is not None else "",
        cheaper,
    )
    return Answer(
        "At what cost?", f"{si(best.job.flops)} FLOPs per example", ", ".join(filter(None, details))
    )


def _certain(comparison: Comparison | None, record: StudyRecord) -> Answer:
    question = "Is it certain?"
    if comparison is None:
        once = "Each candidate was trained once, and validation chose among them"
        how = "; confirm retrains the winners and the baseline from several seeds" if record.finished else ""
        return Answer(question, "Not confirmed yet", once + how, OPEN)
    of = "" if comparison.trial == record.best else f"Trial {comparison.trial}, the nearest: "
    detail = (
        f"{of}{percent(comparison.difference_percent)} on test, 95 % interval {interval(comparison)}, "
        f"{len(comparison.seeds)} seeds; {decimals(comparison.detectable_percent, 2)} % could have been shown"
    )
    value, tone = VERDICTS[comparison.better]
    return Answer(question, value, detail, tone)


def _fits(best: TrialRecord, record: StudyRecord) -> Answer:
    question, plan, cluster = "Does it fit?", best.plan.summary, record.cluster
    executed = best.result.technique
    if cluster is None or plan is None or plan.peak_bytes is None:
        return Answer(question, executed or "Not planned", "no plan was made for a cluster")
    ranks = prod(map(int, plan.ranks.split("x"))) if plan.ranks else cluster.hosts * cluster.gpus_per_host
    size = f"{byte_size(plan.peak_bytes)} of {byte_size(cluster.hbm)} per rank"
    where = f"on {ranks} {'rank' if ranks == 1 else 'ranks'} of {cluster_words(cluster)}"
    if not plan.fits:
        return Answer(question, "No technique fits", f"{size} {where}: {plan.remedy or plan.reason}", BAD)
    trained = f"; trained here with {executed}" if executed and executed != plan.strategy else ""
    return Answer(question, f"Yes, with {plan.strategy}", f"{size} {where}, predicted{trained}", GOOD)


def cluster_words(cluster: ClusterSummary) -> str:
    """Returns the name of a cluster; `this` in words."""
    return "this machine" if cluster.name == "this" else cluster.name


class Command(NamedTuple):
    """A command and what it is for."""

    purpose: str
    line: str


def next_commands(record: StudyRecord) -> tuple[Command, ...]:
    """Returns what a person runs next, the most useful first."""
    directory = shlex.quote(record.directory)
    export = Command("Take the best away", f"dhen-search export {directory} --pick best --out winner")
    if record.best is None or not record.finished:
        way = Command("Go on with the study", f"dhen-search run --out {directory}")
        if record.running and not record.finished:
            way = Command("See how far it is", f"dhen-search status {directory}")
        return (way,) if record.best is None else (way, export)
    predict = Command("Score rows with it", "dhen-search predict winner --data new.csv --out scores.csv")
    if record.comparison(record.best) is not None or record.best == record.baseline:
        return export, predict
    return Command("Find out whether it is certain", confirm_command(record)), export, predict


def export_line(record: StudyRecord, number: int) -> str:
    """Returns the command that exports the trial with this number."""
    return f"dhen-search export {shlex.quote(record.directory)} --pick {number} --out trial-{number}"


def facts(record: StudyRecord) -> tuple[tuple[str, str], ...]:
    """Returns pairs of a name and a text: what a study was run on and with."""
    log, cluster, passes = record.log, record.cluster, record.passes
    splits = {}
    for split, rows in log.rows.items():
        rate = log.base_rate.get(split)
        positive = f", {decimals(100 * rate, 2)} % positive" if rate is not None else ""
        splits[split.capitalize()] = f"{si(rows)} rows{positive}"
    budget = f" of {record.trials_budget}" if record.trials_budget is not None else ""
    minutes = f", {record.seconds_budget / 60:.3g} minutes" if record.seconds_budget else ""
    found = passes is not None and passes.reason is None
    texts = {
        "Study": record.name,
        "Log": log.name,
        **splits,
        "Features": f"{log.tables} tables, {log.numeric} numeric" if log.rows else "",
        "Space": record.space,
        "Sampler": f"{record.sampler}, seed {record.seed}",
        "Candidates": f"{len(record.candidates)}{budget}{minutes}",
        "Judged by": f"the next {record.period}, before it is trained on" if record.period else "validation",
        "Passes": (
            number_of_passes(passes).rstrip(",") + (", found with the baseline" if found else "")
            if passes
            else ""
        ),
        "Planned for": (
            f"{cluster.name}, {cluster.ranks_words} of {byte_size(cluster.hbm)}"
            + ("" if cluster.verified else ", numbers unverified")
            if cluster
            else ""
        ),
        "Serving": f"{record.serving.request}: {record.serving.limits}" if record.serving.limited else "",
        "Table bytes": f"at most {byte_size(record.max_table_bytes)}" if record.max_table_bytes else "",
        "Directory": record.directory,
    }
    return tuple((name, text) for name, text in texts.items() if text)
