"""How far a study is: its stage, how many of how many, and about how long that still takes."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from dashboards.rows import baseline_ne, find, relative_percent
from dashboards.sentences.summary import ended
from dashboards.units import decimals, duration, percent
from trials.record import Outcome, TrialKind
from trials.study_record import Stage, StageName, StudyRecord

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
        shares: how far its running trials are, where that is known.
    """
    stage = record.stage if record.running and not record.finished else None
    budget = f"/{record.trials_budget}" if record.trials_budget is not None else ""
    candidates = f"{record.ended_candidates}{budget} candidates"
    head = f"{stage_line(record, stage, shares or {})}; " if stage and stage.name not in OF_CANDIDATES else ""
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
    return Text(", ".join(clauses)).append(_best(record), style="bold")


def stage_line(record: StudyRecord, stage: Stage, shares: Shares) -> str:
    """A stage in words: `baseline: 1/4 trainings, about 20 s left`; its name alone where nothing is counted."""
    if stage.total is None:
        return str(stage.name)
    noun = NOUNS.get(stage.name, "trainings")
    left = seconds_left_in_stage(record, stage, shares)
    about = f", about {duration(left)} left" if left is not None else ""
    return f"{stage.name}: {done_in_stage(record, stage)}/{stage.total} {noun}{about}"


def done_in_stage(record: StudyRecord, stage: Stage) -> int:
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


def seconds_left_in_stage(record: StudyRecord, stage: Stage, shares: Shares) -> float | None:
    """Estimate from the pace of this stage, with what runs counted in part; None before there is a pace."""
    if stage.total is None:
        return None
    done = done_in_stage(record, stage) + sum(shares.values())
    work, seconds = done - stage.done_before, record.elapsed_seconds - stage.began_seconds
    if work < LEAST_WORK or seconds <= 0:
        return None
    return max(0.0, stage.total - done) * seconds / work


def seconds_left(record: StudyRecord) -> float | None:
    """Estimate for the candidates from the pace so far, within the time budget; None where there is neither a pace
    nor a budget, and where what is left are stages behind the candidates."""
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


def _best(record: StudyRecord) -> str:
    best = find(record, record.best)
    if best is None or best.result.validation is None:
        return ""
    relative = relative_percent(best.result.validation.ne, baseline_ne(record))
    against = f" ({percent(relative)})" if relative is not None else ""
    return f"; best {best.number}: NE {decimals(best.result.validation.ne, 5)}{against}"
