"""One session of `fidelity`: from the settings to the audit and its files; the same command goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dhen.errors import UserError
from search.analysis.fidelity.candidates import Studied, Subject, check_log, drawn, taken
from search.analysis.fidelity.config import FidelityConfig
from search.analysis.fidelity.result import FidelityResult, Trained, result_of
from search.analysis.fidelity.show import markdown, part_name
from search.analysis.reproduce.trainings import Trainings, measured_precision
from search.analysis.reproduce.view import TrainingsView
from search.dataset import OnProgress, open_log
from search.execution.parallelism import slots
from search.execution.trainer import Trainer
from search.run_directory import only_driver, write_atomically
from search.terminal import step_progress
from trials.cluster.machine import Precision
from trials.data.cache import PreparedLog
from trials.job import Job
from trials.processes.launcher import AnyLauncher
from trials.record import TrialRecord

FILE = "fidelity"


def fidelity(
    config: FidelityConfig,
    directory: Path,
    launcher: AnyLauncher,
    console: Console,
    *,
    study: Studied | None = None,
) -> FidelityResult:
    """Trains what the folder lacks of an audit, and writes `fidelity.json` and `fidelity.md` there.

    `study`: a finished one, whose candidates are taken.

    Raises:
        UserError: for whatever is wrong with the settings, the log, the study or the folder.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--out {directory} is a file; give a folder, new or of an earlier audit.")
    with only_driver(directory), step_progress(console) as progress:
        log = open_log(config, progress)
        precision = measured_precision(directory)
        if study:
            check_log(study, log)
            precision = _precision_of(study)
        subjects = taken(study, log, precision) if study else drawn(config, log, precision)
        parallel, threads = slots(config.parallel, config.threads)
        trainer = Trainer(launcher, log, directory, threads=threads, precision=precision)
        trainings = Trainings(trainer, directory, parallel=parallel)
        result = _audited(config, log, subjects, trainer, trainings, console, progress)
        write_atomically(directory / f"{FILE}.json", result.model_dump_json(indent=1))
        write_atomically(directory / f"{FILE}.md", markdown(result))
    return result


def _precision_of(study: Studied) -> Precision:
    """What its candidates were trained in, whatever this machine would choose now."""
    trained = (trial.training.get("precision") for trial in study.record.candidates if trial.curve)
    return "bf16" if next(trained, None) == "bf16" else "fp32"


def _audited(
    config: FidelityConfig,
    log: PreparedLog,
    subjects: Sequence[Subject],
    trainer: Trainer,
    trainings: Trainings,
    console: Console,
    progress: OnProgress,
) -> FidelityResult:
    """Trains by fraction, the cheapest first; a study's own results are not trained again."""
    fractions = (*config.parts, 1.0)
    by_part = {part: [_job(trainer, each, part, config.seed) for each in subjects] for part in fractions}
    reference = [_job(trainer, each, 1.0, config.seed + 1) for each in subjects]
    known = {each.known.fingerprint: each.known for each in subjects if each.known}
    jobs = [job for part in (*by_part.values(), reference) for job in part if job.fingerprint not in known]
    todo = {job.fingerprint: job for job in jobs}
    for done in trainings.finished(jobs):
        del todo[done]
    if todo:
        names = {
            job.fingerprint: f"{each.name}, {part_name(job.training.train_fraction)}, seed {job.seed}"
            for part in (*by_part.values(), reference)
            for each, job in zip(subjects, part, strict=True)
        }
        total = sum(_examples(job, log) for job in todo.values())
        trainings.run(jobs, TrainingsView("training", names, console, progress, total=total))
    records = known | trainings.finished(jobs)
    return result_of(
        config,
        log,
        [each.name for each in subjects],
        [Trained(part, _of(jobs_, records)) for part, jobs_ in by_part.items()],
        _of(reference, records),
    )


def _job(trainer: Trainer, subject: Subject, fraction: float, seed: int) -> Job:
    training = subject.training.replace(train_fraction=fraction)
    return trainer.job(subject.model, training, seed)


def _examples(job: Job, log: PreparedLog) -> int:
    """Of all its passes."""
    return (job.training.epochs or 1) * job.training.rows_used(log.manifest.rows["train"])


def _of(jobs: Sequence[Job], records: dict[str, TrialRecord]) -> list[TrialRecord]:
    return [records[job.fingerprint] for job in jobs]
