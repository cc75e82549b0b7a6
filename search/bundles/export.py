"""Writes a trial of a run directory as a bundle: picks it from the front and gathers its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file, save_file

from dhen.atomic_write import atomic_folder
from dhen.errors import UserError, listed
from dhen.inputs.int8_tables import Int8Tables, use_int8_tables
from search.bundles.bundle import (
    CHECK,
    INFO,
    Bundle,
    BundleInfo,
    Member,
    check_place,
    library_versions,
    weights_names,
    write_beside_weights,
    write_bundle,
)
from search.bundles.increments import MANIFEST, file_hashes, replay, write_manifest
from search.bundles.int8_cost import Int8Cost
from search.config import written_config
from search.dataset import log_files, open_study_log
from search.execution.trainer import trained_job
from search.run_directory import folder_of
from search.selection import picked
from trials.cluster.machine import device
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import READ_AS_FOUND, ReadOptions
from trials.optim.adamw import compute_in, embedding_tables
from trials.records.events import WEIGHTS
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialRecord
from trials.store.weights import read_weights, save_weights
from trials.training.evaluation import evaluate


def export(record: StudyRecord, log: PreparedLog, how: str, out: Path) -> TrialRecord:
    """Writes the bundle of the trial that `how` picks (see `search.selection.picked`); returns the trial.

    A bundle of an average holds all its members. If the trial was trained once more on the rows of training and
    validation together, these networks are exported.

    Raises:
        UserError: if no trial fits, or its weights are no longer there.
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
    """The prepared log of the study in a run directory, prepared again if the cache is gone."""
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


# The log that is named beside a bundle, in the bundle's encoding.


def log_of(bundle: Bundle, data: Sequence[str], options: ReadOptions = READ_AS_FOUND) -> PreparedLog:
    """Returns the log that `--data` names, prepared as at training if it is the bundle's, else in its encoding.

    Raises:
        UserError: for anything wrong with the files, and for a prepared log in another encoding than the bundle's,
            whose ids name other rows of its tables.
    """
    files = log_files(data)
    if len(files) == 1 and PreparedLog.is_prepared(files[0]):
        prepared = PreparedLog.open(files[0])
        if prepared.encoding.fingerprint != bundle.encoding.fingerprint:
            raise UserError(
                f"{files[0]}: this log was prepared in another encoding than that of {bundle.directory}; name "
                "the raw files, and they are read in the bundle's."
            )
        return prepared
    log = prepare(files, schema=bundle.encoding.schema, of_another_log=True, options=options)
    # one log may be fitted by other rules than it was
    same = log.fingerprint == bundle.info.log.fingerprint
    if same and log.encoding.fingerprint == bundle.encoding.fingerprint:
        return log
    return prepare(files, encoding=bundle.encoding, options=options)


# Whether the weights that a study keeps are still in its run directory, in sentences for its report.

MOST_NAMED = 8


def lost_weights(record: StudyRecord) -> tuple[str, ...]:
    """Returns a sentence on the trials that could be exported but for their weights, which are gone; none if
    all are there."""
    directory = Path(record.directory)
    lost = [
        trial.number
        for trial in record.trials
        if trial.number in record.exportable
        and not all(
            (folder_of(directory, network) / WEIGHTS).exists() for network in record.exported_networks(trial)
        )
    ]
    if not lost:
        return ()
    named = listed([str(number) for number in lost], MOST_NAMED)
    of = "trial" if len(lost) == 1 else "trials"
    return (
        f"The weights of {of} {named} are gone from {directory}: they cannot be exported. "
        f"`dhen-search run --out {directory}` trains them again.",
    )


# A bundle copied to another folder, with what its increments brought in the weights themselves.


def copy_whole(bundle: Bundle, out: Path) -> None:
    """Writes a bundle that begins with the version that this one has; increments that follow suit both.

    Raises:
        UserError: if `out` is something else than a bundle.
    """
    check_place(out)
    with atomic_folder(out) as building:
        for name in (*file_hashes(bundle.directory), MANIFEST):
            (building / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.directory / name, building / name)
        if not bundle.increments:
            return
        (name,) = weights_names(bundle.info)
        weights = read_weights(building / name)
        replay(weights, bundle.increments)
        save_weights(weights, building / name)
        stored = load_file(building / CHECK)
        save_file(stored | {"score": bundle.increments[-1].scores()}, building / CHECK)
        info = bundle.info.replace(version=bundle.version, trained=bundle.trained)
        (building / INFO).write_text(json.dumps(info.to_dict(), indent=1), encoding="utf-8")
        write_manifest(building)


# A bundle with tables of 8 bits per value, of the newest version of another, and what they cost in NE.
#
# Rows are rounded to FBGEMM's row-wise format (`dhen.inputs.int8_tables`); all else is copied. The cost is
# measured: both networks score the same rows, and `bundle.json` keeps both metrics.


def write_int8(bundle: Bundle, out: Path, log: PreparedLog) -> Int8Cost:
    """Writes a bundle with tables of 8 bits; this one stays as it is.

    Args:
        bundle: the bundle, with fp32 tables.
        out: the folder of the new one.
        log: the log, in the bundle's encoding, on whose validation rows the cost is measured.

    Returns:
        What the tables cost and save.

    Raises:
        UserError: if there are no tables of fp32, or `out` is something else than a bundle.
    """
    check_place(out)
    if out.resolve() == bundle.directory.resolve():
        raise UserError(f"{out} is the bundle that is exported; choose another --out.")
    if bundle.info.int8_tables is not None:
        raise UserError(f"{bundle.directory} has tables of 8 bits per value already.")
    trained = bundle.model(as_trained=True)
    if not embedding_tables(trained):
        raise UserError(f"{bundle.directory} has no embedding tables; leave --int8-tables out.")
    fp32_bytes = sum(matrix.weight.nbytes for matrix in embedding_tables(trained))
    seen = bundle.info.has_seen_validation and log.fingerprint == bundle.info.log.fingerprint
    split: Literal["validation", "test"] = "test" if seen else "validation"
    fp32 = evaluate(trained.to(device()), log, split)
    del trained  # tables may take most of the memory
    model = bundle.model()
    networks = [model] if bundle.info.job else list(model.networks)  # type: ignore[arg-type]
    with atomic_folder(out) as building:
        for network, name in zip(networks, weights_names(bundle.info), strict=True):
            use_int8_tables(network)
            save_weights(network.state_dict(), building / name)
        int8_bytes = sum(one.packed.nbytes for one in model.modules() if isinstance(one, Int8Tables))
        for network, job in zip(networks, bundle.info.jobs, strict=True):
            assert job.training.precision != "auto"
            compute_in(network, job.training.precision)
        cost = Int8Cost(
            log=log.fingerprint,
            split=split,
            int8=evaluate(model.to(device()), log, split),
            fp32=fp32,
            table_bytes=int8_bytes,
            fp32_table_bytes=fp32_bytes,
        )
        info = bundle.info.replace(int8_tables=cost, version=None, converted=bundle.version)
        write_beside_weights(building, info, bundle.encoding, bundle.examples(), bundle.serving)
    return cost
