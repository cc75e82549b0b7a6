"""Writes a trial of a run directory as a bundle: picks it from the front and gathers its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dhen.errors import UserError
from search.bundles.bundle import BundleInfo, Member, library_versions, write_bundle
from search.config import written_config
from search.dataset import open_study_log
from search.execution.jobs import trained_job
from search.pareto import picked
from search.run_directory import folder_of
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS
from trials.record import TrialRecord
from trials.study_record import StudyRecord


def export(record: StudyRecord, log: PreparedLog, how: str, out: Path) -> TrialRecord:
    """Writes the bundle of the trial that `how` picks (see `search.pareto.picked`); returns the trial.

    A bundle of an average holds all its members. Where the trial was trained once more on the rows of training and
    validation together, these networks are exported.

    Raises:
        UserError: where no trial fits, or its weights are no longer there.
    """
    trial = picked(record, how)
    refit, baseline_refit = record.refit(trial.number), record.refit(record.baseline)
    networks = record.exported_networks(trial)
    weights = [folder_of(Path(record.directory), network) / WEIGHTS for network in networks]
    for network, file in zip(networks, weights, strict=True):
        if not file.exists():
            raise UserError(
                f"{file} is missing; run the study's command again to train trial {network.network_of} again."
            )
    baseline = record.trial(record.baseline) if record.baseline is not None else None
    members = [Member(trial=network.network_of, job=trained_job(network, log)) for network in networks]
    info = bundle_info(trial, members, log, study=record.name, baseline=baseline)
    if refit is not None:
        info = info.replace(test=refit.test, baseline_test=baseline_refit.test if baseline_refit else None)
    info = info.replace(comparison=record.comparison(trial.number))
    write_bundle(out, info, weights, log, record.serving)
    return trial


def study_log(directory: Path) -> PreparedLog:
    """The prepared log of the study in a run directory, prepared again where the cache is gone."""
    return open_study_log(written_config(directory), directory)


def bundle_info(
    trial: TrialRecord,
    networks: Sequence[Member],
    log: PreparedLog,
    *,
    study: str,
    baseline: TrialRecord | None = None,
) -> BundleInfo:
    """What a bundle says of a completed trial, which is of one network or an average of several."""
    assert trial.result.validation is not None
    return BundleInfo(
        study=study,
        trial=trial.number,
        job=networks[0].job if len(networks) == 1 else None,
        members=tuple(networks) if len(networks) > 1 else (),
        log=log.summary().replace(findings=(), notes=()),  # examples of values stay at home
        flops=trial.job.flops or 0.0,
        parameters=trial.job.parameters or 0,
        embedding_parameters=trial.job.embedding_parameters or 0,
        cost=trial.job.cost,
        validation=trial.result.validation,
        test=trial.result.test,
        baseline_validation=baseline.result.validation if baseline else None,
        baseline_test=baseline.result.test if baseline else None,
        negative_sampling_rate=log.schema.negative_sampling_rate,
        planned_technique=trial.plan.technique,
        executed_technique=trial.result.technique,
        versions=library_versions(),
    )
