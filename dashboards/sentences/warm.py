"""What a study began with, in sentences: the earlier studies that it was started from."""

from __future__ import annotations

from trials.record import EarlierStudy, StudyRecord

SHOWN = 3
"""Reasons of a kind, the most frequent ones."""


def warm_starts(record: StudyRecord) -> list[str]:
    """What was reused of each earlier study, and why the rest was not."""
    return [_warm_start(each, record.seed) for each in record.earlier]


def _warm_start(study: EarlierStudy, seed: int) -> str:
    other = f" (seed {study.seed}, here {seed})" if study.seed != seed else ""
    left = [f"{sum(reasons.values())} {kind} ({_most(reasons)})" for kind, reasons in study.left.items()]
    about = f"Warm start: {study.reused} of {study.candidates} candidates of {study.directory}{other}"
    return f"{about}; {', '.join(left)}." if left else f"{about}."


def _most(reasons: dict[str, int]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    by_count = sorted(reasons.items(), key=lambda each: -each[1])
    said = [f"{reason} x {count}" for reason, count in by_count[:SHOWN]]
    more = len(by_count) - SHOWN
    return "; ".join(said + ([f"and {more} other reasons"] if more > 0 else []))
