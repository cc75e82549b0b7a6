"""The candidates of an audit: drawn at random from a space, or those that a finished study has trained."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from dashboards.names import short_name
from dhen.atomic_write import write_atomically
from dhen.config import DhenConfig, ModelConfig
from dhen.errors import UserError
from search.analysis.fidelity_result import (
    FEWEST,
    FidelityConfig,
    FidelityResult,
    markdown,
    part_name,
    result_of,
)
from search.analysis.views import trained
from search.config import StudyConfig, written_config
from search.execution.attempts import parallelism
from search.execution.growth import widen_again
from search.execution.passes import PassFinder
from search.execution.plan_trial import declared_cluster, plan_of, too_little_memory
from search.execution.train_list import TrainingList, measured_precision
from search.execution.trainer import Trainer, candidate_of, job_on, on_all_rows
from search.read_study import read_finished_study
from search.samplers.context import CandidatePricer, evenly
from search.selection import eligible
from search.session import open_session
from spaces.space import load_space
from trials.cluster.machine import Precision
from trials.data.prepared_log import PreparedLog
from trials.planner.plan import Plan
from trials.records.job import Job, TrainingConfig
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialRecord
from trials.runtime.launcher import Launcher

TRIES = 20
"""Number of points drawn per wanted candidate, before a space is said to have too few that fit."""


class AuditedCandidate(NamedTuple):
    """A candidate of an audit."""

    model: DhenConfig
    training: TrainingConfig
    """Training settings on all rows; some may be left open."""
    known: TrialRecord | None = None
    """The candidate's training on all rows from the audit's seed, if a study has done that."""

    @property
    def name(self) -> str:
        """The model in short."""
        return short_name(self.model.to_dict())


def drawn(config: FidelityConfig, log: PreparedLog, precision: Precision) -> list[AuditedCandidate]:
    """As many feasible candidates as are wanted, which all differ in network or training.

    Raises:
        UserError: if the space has too few that fit the declared memory, saying what would.
    """
    space = load_space(config.space, log.features)
    cluster = declared_cluster(config.cluster, config.ranks, config.hbm)
    # no network twice, and not without end
    pricer = CandidatePricer(space, log.features, lambda _: True)
    points = evenly(pricer, set(), random.Random(f"fidelity {config.seed}"), {})
    most = TRIES * config.candidates
    candidates: list[AuditedCandidate] = []
    closest: tuple[Plan, ModelConfig] | None = None
    for drawn_point in islice(points, most):
        model = drawn_point.candidate.model
        training = on_all_rows(config.training, drawn_point.candidate)
        plan = plan_of(job_on(log, model, training, config.seed, precision), cluster)
        if plan.chosen is not None:
            candidates.append(AuditedCandidate(model, training))
        elif closest is None or plan.lacking_bytes < closest[0].lacking_bytes:
            closest = plan, model
        if len(candidates) == config.candidates:
            return candidates
    count = len(candidates)
    if closest is None:
        raise UserError(
            f"space {space.name!r} has {count} candidates that differ, {config.candidates} are wanted: "
            f"give --candidates {max(FEWEST, count)} or a larger space."
        )
    fit = f"only {count} of {config.candidates} wanted fit" if count else "nothing fits"
    raise too_little_memory(space.name, fit, cluster, most, *closest)


class AuditedStudy(NamedTuple):
    """A finished study, to be audited."""

    record: StudyRecord
    config: StudyConfig


def studied(directory: Path) -> AuditedStudy:
    """The study in a run directory.

    Raises:
        UserError: if there is no study, it is not finished, it trained on a part of its log, or it was judged
            by another objective.
    """
    record = read_finished_study(directory)
    config = written_config(directory)
    if config.training.train_fraction != 1.0:
        raise UserError(
            f"{directory}: its candidates trained on {100 * config.training.train_fraction:g} % of the log; an "
            "audit needs what they come to on all of it: name a study without training.train_fraction."
        )
    if config.next_period is not None:
        raise UserError(
            f"{directory}: its candidates were judged by the periods of validation, each scored ahead; an audit "
            "judges by validation as it is: name a study with objective=validation."
        )
    return AuditedStudy(record, config)


def check_log(study: AuditedStudy, log: PreparedLog) -> None:
    """Raises UserError for another log than the study's."""
    audited = study.record.log
    if audited.fingerprint != log.fingerprint:
        raise UserError(
            f"--from {study.record.directory} is a study of another log: its fingerprint is {audited.fingerprint} "
            f"({audited.name}), that of --data {log.fingerprint} ({log.manifest.name}). Leave --data out to take "
            "the study's own, or leave --from out to draw candidates."
        )


def taken(study: AuditedStudy, log: PreparedLog, precision: Precision) -> list[AuditedCandidate]:
    """The study's candidates that have a result on all rows, each network once.

    Raises:
        UserError: for fewer than an audit needs, or a candidate that this version would train otherwise.
    """
    config = study.config
    space = widen_again(load_space(config.space, log.features), study.record.grown)
    trials = [trial for trial in eligible(study.record.candidates) if trial.origin.reused_from is None]
    if len(trials) < FEWEST:
        raise UserError(
            f"{study.record.directory}: {len(trials)} candidates completed, an audit needs {FEWEST} at least."
        )
    # with the passes that the study has found, and how its embeddings decay and its rates fall
    passes = PassFinder(config.training, minutes=None, found=study.record.passes)
    subjects = []
    for trial in trials:
        candidate = candidate_of(trial, space)
        training = passes.applied(on_all_rows(passes.decayed(config.training), candidate))
        job = job_on(log, candidate.model, training, config.seed, precision)
        if job.fingerprint != trial.job.fingerprint:
            raise UserError(
                f"{study.record.directory}: trial {trial.number} was trained as {trial.job.fingerprint}, and "
                f"would be as {job.fingerprint} now: another version of the training code. Leave --from out."
            )
        subjects.append(AuditedCandidate(candidate.model, training, trial))
    return subjects


# One session of `fidelity`: from the settings to the audit and its files; the same command goes on.

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
            # that of the study's trainings, whatever this machine would choose now
            used = (
                each.job.training.get("precision") for each in study.record.candidates if each.result.curve
            )
            precision = "bf16" if next(used, None) == "bf16" else "fp32"
        subjects = taken(study, log, precision) if study else drawn(config, log, precision)
        shares = parallelism(config.parallel, config.threads)
        trainer = Trainer(session.launcher, log, directory, threads=shares.threads, precision=precision)
        trainings = TrainingList(trainer, directory, side_by_side=shares.side_by_side)

        def jobs_of(fraction: float, seed: int) -> list[Job]:
            settings = [(each.model, each.training.replace(train_fraction=fraction)) for each in subjects]
            return [trainer.job(model, training, seed) for model, training in settings]

        # by fraction, the cheapest first; a study's own results are not trained again
        by_part = {part: jobs_of(part, config.seed) for part in (*config.parts, 1.0)}
        reference = jobs_of(1.0, config.seed + 1)
        known = {each.known.job.fingerprint: each.known for each in subjects if each.known}
        wanted = [
            (f"{subject.name}, {part_name(job.training.train_fraction)}, seed {job.seed}", job)
            for part_jobs in (*by_part.values(), reference)
            for subject, job in zip(subjects, part_jobs, strict=True)
            if job.fingerprint not in known
        ]
        records = known | trained(trainings, wanted, "training", console, log.manifest.rows["train"])
        result = result_of(
            config,
            log,
            [subject.name for subject in subjects],
            {part: [records[job.fingerprint] for job in part_jobs] for part, part_jobs in by_part.items()},
            [records[job.fingerprint] for job in reference],
        )
        write_atomically(directory / f"{FILE}.json", result.model_dump_json(indent=1))
        write_atomically(directory / f"{FILE}.md", markdown(result))
    return result
