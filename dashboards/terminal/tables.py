"""A study in the terminal, with or without a TTY: a table of its trials, a line per trial, its progress."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from dashboards.names import IN_WORDS, decimals, duration, milliseconds, percent, si
from dashboards.rows import baseline_ne, columns_of, find, relative_percent, trial_rows
from dashboards.sentences.summary import ended
from trials.records.study_record import StageName, StudyRecord, StudyStage
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

COLUMNS = {
    "trial": "trial",
    "state": "state",
    "ne": "NE",
    "relative": "vs baseline",
    "flops": "FLOPs",
    "ranks": "ranks",
    "forward": "forward",
    "speed": "examples/s",
    "time": "time",
}
"""Titles of `dashboards.rows.COLUMNS`, and of the state, before the model in short, which takes the room that is
left."""
STYLES = {"best": "bold green", "knee": "green", "front": "cyan", "baseline": "yellow"}
OUTCOME_STYLES = {
    Outcome.RUNNING: "blue",
    Outcome.COMPLETED: "",
    Outcome.STOPPED: "dim",
    Outcome.FAILED: "red",
    Outcome.DIVERGED: "red",
}


def trial_table(record: StudyRecord, *, rows: int = 20) -> Table:
    """A table of at most `rows` trials in order of number: those that matter most, then the newest.

    A line below the table lists what is left out. Marks are words, not colour alone. If the terminal is narrow
    the model's name gives way, never a number.
    """
    named, front = {record.baseline, record.best, record.knee}, set(record.front)

    def rank(trial: TrialRecord) -> tuple[int, int]:
        """What runs, baseline, best and knee; the front; then the newest."""
        if trial.result.outcome is Outcome.RUNNING or trial.number in named:
            return 0, -trial.number
        return (1 if trial.number in front else 2), -trial.number

    chosen = heapq.nsmallest(rows, record.trials, key=rank)
    shown = trial_rows(record, sorted(chosen, key=lambda trial: trial.number))
    columns = {column.id: column for column in columns_of(record)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    cells: list[list[str]] = []
    for name, title in COLUMNS.items():
        if name == "state":
            # the outcome; the marks of a completed trial, if it has any
            texts, left = [], True
            for row in shown:
                outcome = row.trial.result.outcome
                said = () if row.marks and outcome is Outcome.COMPLETED else (IN_WORDS[outcome],)
                texts.append(", ".join((*row.marks[:1], *said)))
        elif name in columns:
            texts, left = [columns[name].cell(row)[0] for row in shown], columns[name].unit is None
        else:
            continue
        width = max(map(len, (title, *texts)))
        table.add_column(title, justify="left" if left else "right", no_wrap=True, min_width=width)
        cells.append(texts)
    table.add_column("model")  # the one column that rich may narrow: its cells are cut, not wrapped
    cells.append([row.name for row in shown])
    for row, *row_texts in zip(shown, *cells, strict=True):
        style = STYLES[row.marks[0]] if row.marks else OUTCOME_STYLES.get(row.trial.result.outcome, "magenta")
        # as `Text`, so that brackets in a model's name are not read as markup
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in row_texts), style=style)
    if len(shown) < len(record.trials):
        table.caption = f"{len(shown)} of {len(record.trials)} trials: baseline, front and the newest"
        table.caption_justify = "left"
    return table


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> Table:
    """A table with the columns named in `left` aligned to the left, and all others to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name.lower(), justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def trial_line(record: StudyRecord, number: int) -> Text:
    """A line for logs: `trial 7 completed, NE 0.78123 (-0.31 %), 1.2 M FLOPs, 34 s: 3x[attention] d16`."""
    trial = record.trial(number)
    (row,) = trial_rows(record, [trial])
    relative = f" ({percent(row.relative_percent)})" if row.relative_percent is not None else ""
    kind = "baseline" if trial.kind is TrialKind.BASELINE else "trial"
    clauses = (
        f"{kind} {number} {IN_WORDS[trial.result.outcome]}",
        f"NE {decimals(row.ne, 5)}{relative}" if row.ne is not None else "",
        f"{si(trial.job.flops)} FLOPs" if trial.job.flops is not None else "",
        f"{milliseconds(trial.plan.serving_ms)} forward" if trial.plan.serving_ms is not None else "",
        duration(trial.result.seconds) if trial.result.seconds is not None else "",
    )
    remark = f" ({row.remark})" if row.remark else ""
    return Text(f"{', '.join(clause for clause in clauses if clause)}: {row.name}{remark}")


Shares = Mapping[int, float]
"""Of each trial that trains, by its number, the part of its training that is done, 0 to 1."""
OF_CANDIDATES = (StageName.SEARCH, StageName.TUNING)
"""Stages whose trainings are the candidates, which are counted in any case."""
LEAST_WORK = 0.05
"""Trainings that must be done before the rest is estimated from them: less than that is mostly starting up."""
NOUNS = dict.fromkeys((StageName.AVERAGES, StageName.REFIT, StageName.CONFIRMATION), "retrainings")


def progress_line(record: StudyRecord, shares: Shares | None = None) -> Text:
    """A line such as `search: 12/30 candidates, 14 min 03 s, about 20 min left, running 13, 14; best 7: NE 0.78`.

    Args:
        record: the study.
        shares: how far its running trials are, if that is known.
    """
    stage = record.stage if record.running and not record.finished else None
    budget = f"/{record.trials_budget}" if record.trials_budget is not None else ""
    candidates = f"{record.ended_candidates}{budget} candidates"
    head = ""
    if stage and stage.name not in OF_CANDIDATES:
        head = f"{stage.name}; "
        if stage.total is not None:
            done, seconds = done_in_stage(record, stage), record.elapsed_seconds - stage.began_seconds
            # the pace of this stage, with what runs counted in part
            so_far = done + sum((shares or {}).values())
            work, about = so_far - stage.done_before, ""
            if work >= LEAST_WORK and seconds > 0:
                about = f", about {duration(max(0.0, stage.total - so_far) * seconds / work)} left"
            noun = NOUNS.get(stage.name, "trainings")
            head = f"{stage.name}: {done}/{stage.total} {noun}{about}; "
    name = f"{stage.name}: " if stage and not head else ""
    clauses = [f"{head}{name}{candidates}", duration(record.elapsed_seconds)]
    left = seconds_left(record)
    if record.finished:
        clauses.append("finished")
    elif not record.running:
        clauses.append("not running")
    elif left is not None:
        clauses.append(
            f"about {duration(left)} left{' of the minutes' if head and record.seconds_budget else ''}"
        )
    running = [str(trial.number) for trial in record.trials if trial.result.outcome is Outcome.RUNNING]
    if running:
        clauses.append(f"running {', '.join(running)}")
    best, best_ne = find(record, record.best), ""
    if best is not None and best.result.validation is not None:
        relative = relative_percent(best.result.validation.ne, baseline_ne(record))
        against = f" ({percent(relative)})" if relative is not None else ""
        best_ne = f"; best {best.number}: NE {decimals(best.result.validation.ne, 5)}{against}"
    return Text(", ".join(clauses)).append(best_ne, style="bold")


def done_in_stage(record: StudyRecord, stage: StudyStage) -> int:
    """Number of the stage's trainings that have ended, those of earlier sessions included."""
    return stage.done_before + counted(record, stage.name) - stage.counted_before


def counted(record: StudyRecord, stage: StageName) -> int:
    """Number of trainings in the record that have ended and are of the kind that a stage has."""
    if stage is StageName.BASELINE:
        tuned = (trial for trial in record.trials if trial.kind is TrialKind.BASELINE)
        return len(ended(trial for trial in tuned if trial.origin.promoted_from is None))
    if stage in OF_CANDIDATES:
        return record.ended_candidates
    if stage is StageName.ALL_ROWS:
        return len(ended(record.promoted))
    return len(ended(record.retrainings)) if stage in NOUNS else 0


def seconds_left(record: StudyRecord) -> float | None:
    """Estimate for the candidates from the pace so far, within the time budget; None if there is neither a pace
    nor a budget, and if what is left are stages behind the candidates."""
    estimates = []
    behind = record.stage is not None and record.stage.name not in (StageName.BASELINE, *OF_CANDIDATES)
    pace = _seconds_per_trial(record)
    if record.trials_budget is not None and not behind and pace is not None:
        estimates.append((record.trials_budget - record.ended_candidates) * pace)
    if record.seconds_budget is not None:
        estimates.append(record.seconds_budget - record.elapsed_seconds)
    return max(0.0, min(estimates)) if estimates else None


def _seconds_per_trial(record: StudyRecord) -> float | None:
    """Returns the seconds from the end of one trial to that of the next, by those of this stage; before it has
    any, at most what trials took: the time in which the log was read and the machine measured comes once. None
    before any has ended."""
    stage, candidates = record.stage, ended(record.candidates)
    # candidates that were refused took no time: alone they show no pace
    refused_alone = bool(candidates) and not any(trial.result.seconds for trial in candidates)
    if stage is not None and not refused_alone:
        done = done_in_stage(record, stage) - stage.done_before
        if done > 0 and record.elapsed_seconds > stage.began_seconds:
            return (record.elapsed_seconds - stage.began_seconds) / done
    trials = ended(record.trials)
    took = sum(trial.result.seconds or 0.0 for trial in trials) or record.elapsed_seconds
    seconds = min(took, record.elapsed_seconds)
    return seconds / len(trials) if trials and seconds > 0.0 else None
