"""From a run directory to a bundle: picks a trial off the front and takes it away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.values import parse
from search.bundles.bundle import BundleInfo, Member, library_versions, write_bundle
from search.config import written_config
from search.dataset import open_log
from search.pareto import picked
from search.run_directory import trial_folder
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS
from trials.job import Job, TrainingConfig
from trials.record import StudyRecord, TrialRecord


def export(record: StudyRecord, log: PreparedLog, how: str, out: Path) -> TrialRecord:
    """Writes the bundle of the trial that `how` picks (see `search.pareto.picked`); returns the trial.

    A bundle of an average holds all its members.

    Raises:
        UserError: where nothing fits, or its weights are no longer there.
    """
    trial = picked(record, how)
    networks = record.networks(trial)
    weights = [trial_folder(Path(record.directory), each.owner) / WEIGHTS for each in networks]
    for each, file in zip(networks, weights, strict=True):
        if not file.exists():
            raise UserError(f"{file} is missing; run the study's command again to train trial {each.owner}.")
    baseline = record.trial(record.baseline) if record.baseline is not None else None
    members = [Member(trial=each.number, job=trained_job(each, log, record.seed)) for each in networks]
    info = bundle_info(trial, members, log, study=record.name, baseline=baseline)
    info = info.replace(comparison=record.comparison(trial.number))
    write_bundle(out, info, weights, log, record.serving)
    return trial


def trained_job(trial: TrialRecord, log: PreparedLog, seed: int) -> Job:
    """The job that a finished trial has done, in a study of this seed. Of an average ask for its members'."""
    return Job(
        model=parse_model(trial.model, "ledger"),
        features=log.features,
        log=log.fingerprint,
        training=parse(TrainingConfig, trial.training, "ledger"),
        seed=seed + trial.seed_offset,
    )


def study_log(directory: Path) -> PreparedLog:
    """The prepared log of the study in a run directory, prepared again where the cache is gone."""
    return open_log(written_config(directory))


def bundle_info(
    trial: TrialRecord,
    networks: Sequence[Member],
    log: PreparedLog,
    *,
    study: str,
    baseline: TrialRecord | None = None,
) -> BundleInfo:
    """What a bundle says of a completed trial, which is of one network or an average of several."""
    assert trial.validation is not None
    return BundleInfo(
        study=study,
        trial=trial.number,
        job=networks[0].job if len(networks) == 1 else None,
        members=tuple(networks) if len(networks) > 1 else (),
        log=log.summary(),
        flops=trial.flops or 0.0,
        parameters=trial.parameters or 0,
        embedding_parameters=trial.embedding_parameters or 0,
        cost=trial.cost,
        validation=trial.validation,
        test=trial.test,
        baseline_validation=baseline.validation if baseline else None,
        baseline_test=baseline.test if baseline else None,
        negative_sampling_rate=log.schema.negative_sampling_rate,
        planned_technique=trial.planned_technique,
        executed_technique=trial.executed_technique,
        versions=library_versions(),
    )
