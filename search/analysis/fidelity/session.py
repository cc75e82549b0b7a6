"""One session of `fidelity`: from the settings to the audit and its files; the same command goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dhen.atomic_write import write_atomically
from search.analysis.fidelity.candidates import AuditedCandidate, AuditedStudy, check_log, drawn, taken
from search.analysis.fidelity.config import FidelityConfig
from search.analysis.fidelity.result import FidelityResult, Trained, result_of
from search.analysis.fidelity.show import markdown, part_name
from search.analysis.reproduce.view import TrainingsView
from search.dataset import OnProgress
from search.execution.parallelism import parallelism
from search.execution.train_list import TrainingList, measured_precision
from search.execution.trainer import Trainer
from search.session import open_session
from search.terminal import step_progress
from trials.cluster.machine import Precision
from trials.data.cache import PreparedLog
from trials.job import Job
from trials.processes.launcher import Launcher
from trials.record import TrialRecord

FILE = "fidelity"


def fidelity(
    config: FidelityConfig,
    directory: Path,
    launcher: Launcher,
    console: Console,
    *,
    study: AuditedStudy | None = None,
) -> FidelityResult:
    """Trains what the folder lacks of an audit, and writes `fidelity.json` and `fidelity.md` there.

    `study` is a finished study whose candidates are taken; without it candidates are drawn.

    Raises:
        UserError: for whatever is wrong with the settings, the log, the study or the folder.
    """
    with open_session(directory, config, launcher, console) as session:
        log = session.log
        precision = measured_precision(directory)
        if study:
            check_log(study, log)
            precision = _precision_of(study)
        subjects = taken(study, log, precision) if study else drawn(config, log, precision)
        shares = parallelism(config.parallel, config.threads)
        trainer = Trainer(session.launcher, log, directory, threads=shares.threads, precision=precision)
        trainings = TrainingList(trainer, directory, side_by_side=shares.side_by_side)
        with step_progress(console) as progress:
            result = _audited(config, log, subjects, trainer, trainings, console, progress)
        write_atomically(directory / f"{FILE}.json", result.model_dump_json(indent=1))
        write_atomically(directory / f"{FILE}.md", markdown(result))
    return result


def _precision_of(study: AuditedStudy) -> Precision:
    """The precision of the trainings of a study, whatever this machine would choose now."""
    trained = (trial.job.training.get("precision") for trial in study.record.candidates if trial.result.curve)
    return "bf16" if next(trained, None) == "bf16" else "fp32"


def _audited(
    config: FidelityConfig,
    log: PreparedLog,
    subjects: Sequence[AuditedCandidate],
    trainer: Trainer,
    trainings: TrainingList,
    console: Console,
    progress: OnProgress,
) -> FidelityResult:
    """Trains by fraction, the cheapest first; a study's own results are not trained again."""
    fractions = (*config.parts, 1.0)
    by_part = {
        part: [_job(trainer, candidate, part, config.seed) for candidate in subjects] for part in fractions
    }
    reference = [_job(trainer, candidate, 1.0, config.seed + 1) for candidate in subjects]
    study_records = {
        candidate.known.job.fingerprint: candidate.known for candidate in subjects if candidate.known
    }
    jobs = [
        job
        for part_jobs in (*by_part.values(), reference)
        for job in part_jobs
        if job.fingerprint not in study_records
    ]
    todo = {job.fingerprint: job for job in jobs}
    for fingerprint in trainings.finished(jobs):
        del todo[fingerprint]
    if todo:
        names = {
            job.fingerprint: f"{candidate.name}, {part_name(job.training.train_fraction)}, seed {job.seed}"
            for part_jobs in (*by_part.values(), reference)
            for candidate, job in zip(subjects, part_jobs, strict=True)
        }
        total = sum(_examples(job, log) for job in todo.values())
        trainings.run(jobs, TrainingsView("training", names, console, progress, total=total))
    records = study_records | trainings.finished(jobs)
    return result_of(
        config,
        log,
        [candidate.name for candidate in subjects],
        [Trained(part, _of(part_jobs, records)) for part, part_jobs in by_part.items()],
        _of(reference, records),
    )


def _job(trainer: Trainer, subject: AuditedCandidate, fraction: float, seed: int) -> Job:
    training = subject.training.replace(train_fraction=fraction)
    return trainer.job(subject.model, training, seed)


def _examples(job: Job, log: PreparedLog) -> int:
    """Number of examples of all passes of a job."""
    return job.training.examples(log.manifest.rows["train"])


def _of(jobs: Sequence[Job], records: dict[str, TrialRecord]) -> list[TrialRecord]:
    return [records[job.fingerprint] for job in jobs]
