"""What `run` and `average` print with `--json`, made of a study's record."""

from __future__ import annotations

from pathlib import Path

from dashboards.rows import baseline_ne, find
from dashboards.sentences.summary import sentences
from search.run_directory import BEST, REPORT
from search.verbs.output import FinishedRun
from trials.records.study_record import StudyRecord


def finished_run(record: StudyRecord) -> FinishedRun:
    """Returns the study in short."""
    directory, best = Path(record.directory), find(record, record.best)
    quality = best.result.validation if best else None
    return FinishedRun(
        directory=record.directory,
        finished=record.finished,
        baseline=record.baseline,
        best=record.best,
        knee=record.knee,
        front=record.front,
        best_ne=quality.ne if quality else None,
        baseline_ne=baseline_ne(record),
        sentences=tuple(sentences(record)),
        report=str(directory / REPORT),
        bundle=str(directory / BEST) if record.front else None,
    )
