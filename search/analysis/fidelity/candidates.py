"""The candidates of an audit: drawn at random from a space, or those that a finished study has trained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dashboards.names import short_name
from dhen.config import DhenConfig
from dhen.errors import UserError
from search.analysis.fidelity.config import FEWEST, FidelityConfig
from search.config import StudyConfig, written_config
from search.execution.jobs import candidate_of, job_on, on_all_rows
from search.execution.passes import Passes
from search.growth.replay import widen_again
from search.pareto import eligible
from search.planning.plan_trial import declared_cluster, plan_of
from search.planning.space_fits import UnfitCandidate, too_little_memory
from search.read_study import read_finished_study
from search.samplers.draw import DrawnPoint, evenly
from search.samplers.static_cost import CandidatePricer
from spaces.catalog_loader import load_space
from spaces.space import Candidate, Space
from trials.cluster.cluster import Cluster
from trials.cluster.machine import Precision
from trials.data.cache import PreparedLog
from trials.job import TrainingConfig
from trials.record import TrialRecord
from trials.study_record import StudyRecord

TRIES = 20
"""Number of points drawn per wanted candidate, before a space is said to have too few that fit."""


class AuditedCandidate(NamedTuple):
    """A candidate of an audit."""

    name: str
    model: DhenConfig
    training: TrainingConfig
    """Training settings on all rows; some may be left open."""
    known: TrialRecord | None = None
    """The candidate's training on all rows from the audit's seed, where a study has done that."""


def drawn(config: FidelityConfig, log: PreparedLog, precision: Precision) -> list[AuditedCandidate]:
    """As many feasible candidates as are wanted, which all differ in network or training.

    Raises:
        UserError: where the space has too few that fit the declared memory, saying what would.
    """
    space = load_space(config.space, log.features)
    cluster = declared_cluster(config.cluster, config.ranks, config.hbm)
    candidates: list[AuditedCandidate] = []
    closest: UnfitCandidate | None = None
    for drawn_point in _points(space, log, config):
        training = on_all_rows(config.training, drawn_point.priced.candidate)
        plan = plan_of(
            job_on(log, drawn_point.priced.candidate.model, training, config.seed, precision),
            cluster,
        )
        if plan.chosen is not None:
            candidates.append(_subject(drawn_point.priced.candidate, training))
        else:
            closest = UnfitCandidate(drawn_point, plan).nearer(closest)
        if len(candidates) == config.candidates:
            return candidates
    raise _too_few(space, cluster, len(candidates), config, closest)


def _points(space: Space, log: PreparedLog, config: FidelityConfig) -> Iterator[DrawnPoint]:
    """Points of the space, no network twice, and not without end."""
    pricer = CandidatePricer(space, log.features, lambda _: True)
    points = evenly(pricer, set(), random.Random(f"fidelity {config.seed}"), {})
    return islice(points, TRIES * config.candidates)


def _subject(
    candidate: Candidate, training: TrainingConfig, trained: TrialRecord | None = None
) -> AuditedCandidate:
    return AuditedCandidate(short_name(candidate.model.to_dict()), candidate.model, training, trained)


def _too_few(
    space: Space,
    cluster: Cluster,
    count: int,
    config: FidelityConfig,
    closest: UnfitCandidate | None,
) -> UserError:
    if closest is None:
        return UserError(
            f"space {space.name!r} has {count} candidates that differ, {config.candidates} are wanted: "
            f"give --candidates {max(FEWEST, count)} or a larger space."
        )
    fit = f"only {count} of {config.candidates} wanted fit" if count else "nothing fits"
    return too_little_memory(space.name, fit, cluster, TRIES * config.candidates, closest)


class AuditedStudy(NamedTuple):
    """A finished study, to be audited."""

    record: StudyRecord
    config: StudyConfig


def studied(directory: Path) -> AuditedStudy:
    """The study in a run directory.

    Raises:
        UserError: where there is no study, it is not finished, it trained on a part of its log, or it was judged
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
    passes = Passes(config.training, minutes=None, found=study.record.passes)
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
        subjects.append(_subject(candidate, training, trial))
    return subjects
