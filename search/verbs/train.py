"""`train`: one configuration, from nothing or from a bundle's weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from dashboards.names import trial_name
from dashboards.sentences.stages import decay_left_out
from dhen.atomic_write import write_atomically
from dhen.config import ModelConfig
from dhen.errors import UserError, unknown_name
from dhen.model import catalog, named_model, parse_model
from dhen.values import fingerprint, parse
from search.bundles.bundle import Member, check_place, is_bundle, read_bundle, write_bundle
from search.bundles.export import bundle_info
from search.bundles.growing_columns import with_growing_columns
from search.config import EXECUTED_KEYS, LOG_KEYS, StudyConfig, held_config
from search.dataset import log_files, open_log
from search.execution.attempts import execution, most_ranks, plan_options, ranks_here
from search.execution.passes import (
    DECAYS,
    FALLING,
    MOST_PASSES,
    falling_passes,
    found_passes,
    many_passes,
    open_decays,
)
from search.execution.plan_trial import LOCAL, declared_clusters, planned
from search.execution.retraining import score_one
from search.execution.train_list import train_one
from search.execution.trainer import Trainer, job_on, new_record, refit_job
from search.log_config import data_option, set_override
from search.study.tuning import read_configuration
from search.terminal import print_line, print_notes, step_progress
from search.verbs.output import PATH, TrainedBundle, json_option, print_json
from trials.cluster.machine import preferred_precision
from trials.data.encoding import Encoding
from trials.data.periods import check_periods
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.events import WEIGHTS
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import named
from trials.records.trial_record import Outcome, TrialKind, TrialRecord
from trials.runtime.launcher import Launcher

OUTPUT = TrainedBundle
RECORD = "record.json"
"""The record of a training that has ended, in its folder, while another one goes on."""
FOLDER_DIGITS = 12
"""Number of digits of a fingerprint in the name of the folder that a training that was cut short goes on from."""


@click.command(
    epilog="""\b
Examples:
  dhen-search train runs/demo/best --data log.csv --out retrained seed=1
  dhen-search train runs/demo/best --data newer.csv --out newer refit=yes
  dhen-search train runs/demo/best --data newer.csv --from-weights --out continued
  dhen-search train runs/demo/best --data newer.csv --from-weights --out grows 'growing.columns=[user]'
  dhen-search train dcn_v2 --data log.csv --out dcn training.epochs=2
  dhen-search train runs/demo/best --data log.csv --out sharded ranks=1x4 hbm=2GiB
"""
)
@click.argument("what", metavar="BUNDLE|CONFIG.yaml|MODEL")
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@data_option(required=True)
@click.option("--out", type=PATH, required=True, help="The new bundle's folder.")
@click.option("--from-weights", is_flag=True, help="Go on from the bundle's weights, in its encoding.")
@click.option("--member", type=int, help="Which network of a bundle that is an average: 0, 1 ...")
@json_option("The bundle and its metrics as JSON.")
def command(
    what: str,
    overrides: tuple[str, ...],
    data: tuple[str, ...],
    out: Path,
    from_weights: bool,
    member: int | None,
    as_json: bool,
) -> None:
    """Train one configuration and write it as a bundle. Keys: seed, model.KEY, training.KEY, objective, period,
    refit, ranks, hbm, prefer, technique, memory_margin, servers, enforce_memory, and how the log is read: label,
    weight, columns.NAME, format, csv.KEY, schema_file, split.KEY, growing, skip_bad_rows, demo.KEY.

    With refit=yes it is trained once more then, on the rows of training and validation together, for as many
    passes as it took to its best, and that is written.

    With one of the keys from ranks on it is planned, and held as a study holds its candidates. After Ctrl-C the
    same command goes on.
    """
    console = Console(stderr=as_json)
    model, training, config = _configuration(what, overrides, data, member)
    if from_weights and not is_bundle(Path(what)):
        raise UserError(f"--from-weights goes on from a bundle's weights; {what} is no bundle.")
    check_place(out)
    launcher = Launcher(several_ranks=ranks_here(config) > 1)
    launcher.warm_up()
    source: Path | None = None
    start: Path | None = None
    encoding: Encoding | None = None
    if from_weights:
        bundle = read_bundle(Path(what))
        source = start = bundle.weights(member)
        encoding = bundle.encoding
        if config.growing.columns is not None:
            start = out.absolute().parent / f".{out.name}.training.start.safetensors"
            start.parent.mkdir(parents=True, exist_ok=True)
            click.get_current_context().call_on_close(partial(start.unlink, missing_ok=True))
            encoding = with_growing_columns(bundle, member, config.growing, start)
    with step_progress(console) as progress:
        log = _open(what, config, progress, encoding)
    print_notes(console, log.notes)
    if config.next_period is not None:
        check_periods(log, config.next_period, most_ranks(config))

    def folder_of(job: Job) -> Path:
        """The folder of a training, whose name tells it from others that were cut short."""
        begins_at = [str(source.absolute()), source.stat().st_mtime_ns] if source else []
        identity = fingerprint([job.fingerprint, *begins_at])[:FOLDER_DIGITS]
        return out.absolute().parent / f".{out.name}.training.{identity}"

    trained: list[_Trained] = []
    folders: list[Path] = []
    while (settings := _next(training, trained, len(folders))) is not None:
        job = job_on(log, model, settings, config.seed, preferred_precision())
        job = job.replace(period=config.next_period)
        folders.append(folder_of(job))
        try:
            trained.append(_train(job, folders[-1], launcher, log, config, start, console))
        except UserError as error:
            if not trained:
                raise
            console.print(f"{error} The others count.", markup=False)
    best = min(trained, key=lambda one: one.ne)
    job, record, trainer = best.job, best.record, best.trainer
    if len(trained) > 1:
        passes = "one pass" if job.training.epochs == 1 else f"up to {job.training.epochs} passes"
        if job.training.schedule == FALLING["schedule"]:
            passes += " over which learning rates fall"
        decays = "".join(f", {key}={rate:g}" for key in DECAYS[-1] if (rate := getattr(job.training, key)))
        console.print(f"kept: the training with {passes}{decays}")
        if (technique := _undecayed_under(trained[0])) is not None:
            console.print(decay_left_out(technique), soft_wrap=True)
    if config.refit is True:
        again = refit_job(record, log)
        folders.append(folder_of(again))
        rows = log.manifest.rows["train"] + log.manifest.rows["validation"]
        console.print(f"once more, on the {rows:,} rows of training and validation together")
        job, after, trainer = _train(again, folders[-1], launcher, log, config, start, console)
        record = after.with_result(validation=record.result.validation)
    record = record.with_result(test=score_one(record, job, "test", trainer))
    info = bundle_info(record, [Member(trial=0, job=job)], log, study="train")
    write_bundle(out, info, [trainer.folder(record) / WEIGHTS], log)
    for folder in folders:  # also of those that did not complete; what fits no memory has none
        shutil.rmtree(folder, ignore_errors=True)
    assert record.result.test is not None
    if as_json:
        assert record.result.validation is not None
        assert best.job.training.epochs != "auto"
        bundle_value = TrainedBundle(
            bundle=str(out),
            architecture=trial_name(record),
            epochs=best.job.training.epochs,
            trainings=len(trained),
            seed=best.job.seed,
            refit=record.job.refit is not None,
            validation=record.result.validation,
            test=record.result.test,
        )
        print_json(bundle_value)
        return
    before = " before it was trained on" if config.refit is True else ""
    console.print(f"validation NE {best.ne:.5f}{before}, test NE {record.result.test.ne:.5f}")
    console.print(f"bundle: {out}", soft_wrap=True)


class _Trained(NamedTuple):
    """A training that has ended well."""

    job: Job
    record: TrialRecord
    trainer: Trainer

    @property
    def ne(self) -> float:
        """NE on validation."""
        assert self.record.result.validation is not None
        return self.record.result.validation.ne


def _next(training: TrainingConfig, trained: Sequence[_Trained], tried: int) -> TrainingConfig | None:
    """The settings of the next training; None after the last. If passes are left open there are several, and
    the best one is kept: one pass, as many as help, with each way for embeddings to decay, and, if all of these
    completed, as many over which learning rates fall."""
    if training.epochs != "auto":
        return None if tried else training
    if not tried:
        return training.replace(epochs=1)
    decays = open_decays(training, of_tables=_undecayed_under(trained[0]) is None)
    if tried <= len(decays):
        many = many_passes(training, MOST_PASSES, trained[0].record)
        return training.replace(**many, **decays[tried - 1])
    if training.schedule != "auto" or len(trained) < tried:
        return None
    one_pass, *others = (one.record for one in trained)
    several, fallen = others[: len(decays)], others[len(decays) :]
    found = found_passes(one_pass, several)
    passes = falling_passes(found, fallen)
    return training.replace(epochs=passes, **FALLING, **found.decays) if passes is not None else None


def _undecayed_under(first: _Trained) -> str | None:
    """The technique that was forced or needed for the first training, if it excludes decay of whole tables."""
    technique = first.record.plan.technique
    return technique if technique is not None and named(technique).tables != "device" else None


def _train(
    job: Job,
    folder: Path,
    launcher: Launcher,
    log: PreparedLog,
    config: StudyConfig,
    start: Path | None,
    console: Console,
) -> _Trained:
    """Trains a job in a folder, unless an earlier command has."""
    trainer, record = Trainer(launcher, log, folder), new_record(0, TrialKind.CANDIDATE, {}, job)
    if any(getattr(config, key) != StudyConfig.model_fields[key].default for key in EXECUTED_KEYS):
        # planned if ranks or their memory are declared
        clusters = declared_clusters(LOCAL, config.shapes, config.hbm)
        executed = execution(config, *clusters)
        record = executed.corrected(planned(record, job, clusters, plan_options(config)))
        if record.result.outcome is Outcome.INFEASIBLE:
            raise UserError(record.result.error or "no memory technique fits.")
        trainer = Trainer(launcher, log, folder, execution=executed)
    done = folder / RECORD
    if done.exists():
        return _Trained(job, TrialRecord.model_validate_json(done.read_text()), trainer)

    shown = 0

    def show(record: TrialRecord) -> None:
        """Prints each evaluation as a line."""
        nonlocal shown
        for point in record.result.curve[shown:]:
            metrics = point.validation
            console.print(
                f"{point.examples:>12,} examples  train loss {point.train_loss:.5f}  "
                f"validation NE {metrics.ne:.5f}  AUC {metrics.auc:.5f}  {point.seconds:.1f} s"
            )
        shown = len(record.result.curve)

    record = train_one(record, job, trainer, show, start_from=start, say=partial(print_line, console))
    if record.result.outcome is not Outcome.COMPLETED:
        raise UserError(f"training ended as {record.result.outcome}: {record.result.error}")
    write_atomically(done, record.model_dump_json())
    return _Trained(job, record, trainer)


def _configuration(
    what: str, overrides: tuple[str, ...], log: tuple[str, ...], member: int | None
) -> tuple[ModelConfig, TrainingConfig, StudyConfig]:
    """Model and training of a bundle, a file or a shipped model, with the overrides applied; and its seed, how
    the model is held and how the log is read, as a study's settings."""
    path, seed, period = Path(what), 0, None
    if member is not None and not is_bundle(path):
        raise UserError(
            f"--member {member} names a network of a bundle that is an average; {what} is no bundle."
        )
    if is_bundle(path):
        job = read_bundle(path).job(member)
        model, training, seed, period = job.model, job.training, job.seed, job.period
        if job.teacher is not None:
            click.echo(
                "the bundle's network had learnt from an average, which is not at hand: it is trained on the "
                "log's labels alone",
                err=True,
            )
    elif path.exists():
        model, training = read_configuration(path, TrainingConfig())
    elif what in catalog():
        model, training = named_model(what), TrainingConfig()
    else:
        names = ", ".join(sorted(catalog()))
        raise UserError(f"{what!r} is no bundle, no configuration file and no shipped model ({names}).")
    data: dict[str, Any] = {"model": model.to_dict(), "training": training.to_dict(), "seed": seed}
    for word in overrides:
        set_override(data, word)
    if period is not None and data.setdefault("objective", "next_period") == "next_period":
        data.setdefault("period", period)
    own = ("seed", "objective", "period", "refit", *EXECUTED_KEYS, *LOG_KEYS)
    known = ("model", "training", *own)
    for unknown in sorted(set(data) - set(known)):
        raise unknown_name("key", unknown, known)
    training = parse(TrainingConfig, data["training"], "training")
    config = held_config({"data": log} | {key: data[key] for key in own if key in data}, training, "train")
    return parse_model(data["model"], "model"), training, config


def _open(what: str, config: StudyConfig, progress: Any, encoding: Encoding | None) -> PreparedLog:
    """The log, by the bundle's schema if there is one, so that equal logs are prepared equally; or in the
    encoding of weights that are gone on from."""
    sources = log_files(config.data, config.demo, progress)
    prepared = len(sources) == 1 and PreparedLog.is_prepared(sources[0])
    if not is_bundle(Path(what)) or (prepared and encoding is None):
        return open_log(config, progress)
    if config.schema_file is not None:
        raise UserError("schema_file: the log is read as the bundle has it; leave this key out.")
    if encoding is not None:
        return prepare(sources, options=config, progress=progress, encoding=encoding)
    schema = read_bundle(Path(what)).encoding.schema
    return prepare(sources, options=config, progress=progress, schema=schema, of_another_log=True)
