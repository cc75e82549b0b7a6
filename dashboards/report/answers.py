"""What the first screen of a report answers: how much better, at what cost, is it certain, does it fit, and
what to run next. Below are the facts of a study, by which two are compared, too."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from math import prod

from dashboards.names import byte_size, decimals, known, milliseconds, percent, ratio, si, trial_name
from dashboards.rows import TrialRow, find, trial_rows
from dashboards.sentences.stages import number_of_passes
from dashboards.sentences.summary import ended
from dashboards.sentences.winners import confirm_command, interval
from trials.records.findings import Better
from trials.records.study_record import ClusterSummary, Comparison, StudyRecord
from trials.records.trial_record import TrialRecord

VERDICTS = {
    Better.YES: "Yes, better",
    Better.NO: "Yes, worse",
    Better.CANNOT_TELL: "This log cannot tell",
}
GOOD, BAD, OPEN = "good", "bad", "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question with its answer."""

    question: str
    value: str
    detail: str
    tone: str = ""
    """`good`, `bad` or `open` where the answer is a verdict; what it is also stands in its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval to be drawn beside zero, in percent."""

    low: float
    point: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The first screen but for its figure and its commands."""

    headline: str
    model: str | None
    """The best's number and model in short."""
    number: int | None
    """The best's number."""
    answers: tuple[Answer, ...]
    interval: Interval | None
    """The interval of the answer on certainty."""
    memory_share: float | None
    """Share of a rank's memory that the best is predicted to take, from 0 on."""


def answers(record: StudyRecord) -> Answers:
    """Returns what the record can answer of its best."""
    best, baseline = find(record, record.best), find(record, record.baseline)
    if best is None:
        return Answers(
            headline=_without_result(record),
            model=None,
            number=None,
            answers=(),
            interval=None,
            memory_share=None,
        )
    row = trial_rows(record, (best,))[0]
    comparison = telling_comparison(record)
    return Answers(
        headline=_headline(row, baseline, record),
        model=f"trial {best.number}, {trial_name(best)}",
        number=best.number,
        answers=(
            _better(row, baseline, record),
            _cost(best, baseline, record),
            _certain(comparison, record),
            _fits(best, record),
        ),
        interval=_drawn(comparison),
        memory_share=_share(best, record),
    )


def telling_comparison(record: StudyRecord) -> Comparison | None:
    """Returns the best's comparison; where the baseline is the best, that of the winner with the lowest NE."""
    if record.best is not None and record.best == record.baseline:
        return min(record.comparisons, key=lambda compared: compared.difference_percent, default=None)
    return record.comparison(record.best)


def _without_result(record: StudyRecord) -> str:
    if not record.trials:
        return "No trial has started yet"
    return "No candidate has a result" if ended(record.candidates) else "No candidate has ended yet"


def _headline(best: TrialRow, baseline: TrialRecord | None, record: StudyRecord) -> str:
    relative = best.relative_percent
    if baseline is not None and best.trial.number == baseline.number:
        return "No candidate is better than the tuned baseline, beyond the noise of choosing"
    if relative is None:
        return f"NE {decimals(best.ne, 5)}, and no baseline yet to compare it with"
    if abs(relative) < 0.005:
        return "Level with the tuned baseline" + _at(best.trial, baseline)
    side = "lower" if relative < 0 else "higher"
    return f"NE {abs(relative):.2f} % {side} than the tuned baseline's" + _at(best.trial, baseline)


def _at(best: TrialRecord, baseline: TrialRecord | None) -> str:
    times = _times(best, baseline)
    return f", at {times} its FLOPs" if times else ""


def _times(best: TrialRecord, baseline: TrialRecord | None) -> str | None:
    if baseline is None or not best.job.flops or not baseline.job.flops:
        return None
    return ratio(best.job.flops / baseline.job.flops)


def _better(best: TrialRow, baseline: TrialRecord | None, record: StudyRecord) -> Answer:
    ne = f"NE {decimals(best.ne, 5)} on validation"
    question = "How much better?"
    if baseline is None or best.relative_percent is None:
        return Answer(question=question, value=decimals(best.ne, 5), detail=f"{ne}; there is no baseline yet")
    if best.trial.number == baseline.number:
        detail = f"{ne}: the baseline itself is the best"
        return Answer(question=question, value="0.00 %", detail=detail, tone=BAD)
    against = trial_rows(record, (record.baseline_for(best.trial) or baseline,))[0]
    tone = GOOD if best.relative_percent < 0 else BAD
    detail = f"{ne} against the baseline's {decimals(against.ne, 5)}; lower is better"
    return Answer(question=question, value=percent(best.relative_percent), detail=detail, tone=tone)


def _cost(best: TrialRecord, baseline: TrialRecord | None, record: StudyRecord) -> Answer:
    times, serving_ms = _times(best, baseline), best.plan.serving_ms
    other = baseline if baseline is not None and baseline.number != best.number else None
    details = (
        f"{times} the baseline's {si(other.job.flops)}" if times and other else "",
        f"{si(best.job.parameters)} dense parameters" if best.job.parameters is not None else "",
        f"{byte_size(best.job.weights_bytes)} of weights" if best.job.weights_bytes is not None else "",
        f"{milliseconds(serving_ms)} for a request" if serving_ms is not None else "",
        _cheaper(best, baseline, record),
    )
    return Answer(
        question="At what cost?",
        value=f"{si(best.job.flops)} FLOPs per example",
        detail=", ".join(filter(None, details)),
    )


def _cheaper(best: TrialRecord, baseline: TrialRecord | None, record: StudyRecord) -> str:
    """The knee beside a best that costs more; empty if the knee costs no less."""
    knee = find(record, record.knee)
    if knee is None or baseline is None or best.number == baseline.number:
        return ""
    if (knee.job.flops or 0.0) >= (best.job.flops or 0.0):
        return ""
    relative, times = trial_rows(record, (knee,))[0].relative_percent, _times(knee, baseline)
    return f"cheaper: trial {knee.number}, {percent(relative)} at {times}" if times else ""


def _certain(comparison: Comparison | None, record: StudyRecord) -> Answer:
    question = "Is it certain?"
    if comparison is None:
        once = "Each candidate was trained once, and validation chose among them"
        how = "; confirm retrains the winners and the baseline from several seeds" if record.finished else ""
        return Answer(question=question, value="Not confirmed yet", detail=once + how, tone=OPEN)
    tone = {Better.YES: GOOD, Better.NO: BAD}.get(comparison.better, OPEN)
    of = "" if comparison.trial == record.best else f"Trial {comparison.trial}, the nearest: "
    seeds = len(comparison.seeds)
    return Answer(
        question=question,
        value=VERDICTS[comparison.better],
        detail=(
            f"{of}{percent(comparison.difference_percent)} on test, 95 % interval {interval(comparison)}, "
            f"{seeds} seeds; {decimals(comparison.detectable_percent, 2)} % could have been shown"
        ),
        tone=tone,
    )


def _drawn(comparison: Comparison | None) -> Interval | None:
    if comparison is None:
        return None
    values = (comparison.low_percent, comparison.difference_percent, comparison.high_percent)
    return Interval(low=values[0], point=values[1], high=values[2]) if all(map(known, values)) else None


def _fits(best: TrialRecord, record: StudyRecord) -> Answer:
    question, plan = "Does it fit?", best.plan.summary
    executed = best.result.technique
    if record.cluster is None or plan is None or plan.peak_bytes is None:
        value = executed or "Not planned"
        return Answer(question=question, value=value, detail="no plan was made for a cluster")
    cluster = record.cluster
    ranks = prod(map(int, plan.ranks.split("x"))) if plan.ranks else cluster.hosts * cluster.gpus_per_host
    size = f"{byte_size(plan.peak_bytes)} of {byte_size(cluster.hbm)} per rank"
    where = f"on {ranks} {'rank' if ranks == 1 else 'ranks'} of {cluster_words(cluster)}"
    trained = f"; trained here with {executed}" if executed and executed != plan.strategy else ""
    if not plan.fits:
        detail = f"{size} {where}: {plan.remedy or plan.reason}"
        return Answer(question=question, value="No technique fits", detail=detail, tone=BAD)
    detail = f"{size} {where}, predicted{trained}"
    return Answer(question=question, value=f"Yes, with {plan.strategy}", detail=detail, tone=GOOD)


def cluster_words(cluster: ClusterSummary) -> str:
    """Returns the name of a cluster; `this` in words."""
    return "this machine" if cluster.name == "this" else cluster.name


def _share(best: TrialRecord, record: StudyRecord) -> float | None:
    plan = best.plan.summary
    if record.cluster is None or plan is None or plan.peak_bytes is None or not record.cluster.hbm:
        return None
    return plan.peak_bytes / record.cluster.hbm


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and what it is for."""

    purpose: str
    line: str


def next_commands(record: StudyRecord) -> tuple[Command, ...]:
    """Returns what a person runs next, the most useful first."""
    directory = shlex.quote(record.directory)
    if record.best is None or not record.finished:
        way = (
            Command(purpose="See how far it is", line=f"dhen-search status {directory}")
            if record.running and not record.finished
            else Command(purpose="Go on with the study", line=f"dhen-search run --out {directory}")
        )
        return (way, *_export(record, directory)[:1])
    confirm = Command(purpose="Find out whether it is certain", line=confirm_command(record))
    confirmed = record.comparison(record.best) is not None or record.best == record.baseline
    return (*(() if confirmed else (confirm,)), *_export(record, directory))


def export_line(record: StudyRecord, number: int) -> str:
    """Returns the command that exports the trial with this number."""
    return f"dhen-search export {shlex.quote(record.directory)} --pick {number} --out trial-{number}"


def _export(record: StudyRecord, directory: str) -> tuple[Command, ...]:
    if record.best is None:
        return ()
    return (
        Command(
            purpose="Take the best away", line=f"dhen-search export {directory} --pick best --out winner"
        ),
        Command(
            purpose="Score rows with it",
            line="dhen-search predict winner --data new.csv --out scores.csv",
        ),
    )


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
