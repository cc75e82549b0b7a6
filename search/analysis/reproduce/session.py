"""One session of `reproduce`: from the settings to the trained table and its files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dashboards.figures.curves import milestones_figure
from dashboards.report.page import write_figure
from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from search.analysis.reproduce.config import TableConfig
from search.analysis.reproduce.result import TableResult, result_of
from search.analysis.reproduce.show import heading, markdown
from search.analysis.reproduce.tables import table_of
from search.analysis.reproduce.view import TrainingsView
from search.execution.parallelism import parallelism
from search.execution.train_list import TrainingList, measured_precision
from search.execution.trainer import Trainer
from search.session import open_session
from search.terminal import step_progress
from trials.data.cache import PreparedLog
from trials.job import TrainingConfig
from trials.processes.launcher import Launcher


def reproduce(
    name: str, config: TableConfig, directory: Path, launcher: Launcher, console: Console
) -> TableResult:
    """Trains what the folder lacks of a table, and writes `NAME.json`, `NAME.md` and `NAME.html` there.

    Raises:
        UserError: for whatever is wrong with the settings, the log or the folder.
    """
    with open_session(directory, config, launcher, console) as session:
        log = session.log
        table = table_of(config, log.features)
        shares = parallelism(config.parallel, config.threads)
        precision = measured_precision(directory)
        trainer = Trainer(session.launcher, log, directory, threads=shares.threads, precision=precision)
        training = _training(config, log, trainer)
        seeds = range(config.seed, config.seed + config.seeds)
        jobs = [[trainer.job(row.model, training, seed) for seed in seeds] for row in table.rows]
        by_seed = [job for seed_jobs in zip(*jobs, strict=True) for job in seed_jobs]
        trainings = TrainingList(trainer, directory, side_by_side=shares.side_by_side)
        todo = {job.fingerprint for job in by_seed} - set(trainings.finished(by_seed))
        if todo:
            examples = training.examples(log.manifest.rows["train"]) * len(todo)
            names = {
                job.fingerprint: f"{row.name}, seed {job.seed}"
                for row, row_jobs in zip(table.rows, jobs, strict=True)
                for job in row_jobs
            }
            with step_progress(console) as progress:
                view = TrainingsView(f"training {name}", names, console, progress, total=examples)
                trainings.run(by_seed, view)
        records = trainings.finished(by_seed)
        result = result_of(name, table, config, jobs, records, log.manifest.rows)
        _write(result, directory)
    return result


def _training(config: TableConfig, log: PreparedLog, trainer: Trainer) -> TrainingConfig:
    """The training settings of all rows, with an evaluation at each milestone.

    Raises:
        UserError: for a log with fewer steps than milestones.
    """
    training = config.training
    rows = log.manifest.rows["train"]
    resolved = training.resolved(rows, trainer.precision)
    examples = resolved.examples(rows)
    if training.evaluate_every is None:
        resolved = resolved.replace(evaluate_every=max(1, examples // config.milestones))
    assert resolved.batch_size is not None
    steps = examples // resolved.batch_size
    if steps < config.milestones:
        raise UserError(
            f"the log is too small: {resolved.rows_used(rows):,} training rows in batches of "
            f"{resolved.batch_size} are {steps} step(s), fewer than the {config.milestones} milestones; give a "
            "larger log, a smaller training.batch_size or fewer milestones."
        )
    return resolved


def _write(result: TableResult, directory: Path) -> None:
    write_atomically(directory / f"{result.table}.json", result.model_dump_json(indent=1))
    write_atomically(directory / f"{result.table}.md", markdown(result))
    first, *others = result.rows
    lines = {
        row.name: [(estimate.mean, estimate.half_width) if estimate else None for estimate in row.relative]
        for row in others
    }
    figure = milestones_figure(lines, result.milestones, title=heading(result), reference=first.name)
    write_figure(figure, directory / f"{result.table}.html")
