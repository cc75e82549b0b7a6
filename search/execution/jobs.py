"""From models to jobs, and from jobs to the records of trials that are about to start."""

from __future__ import annotations

import datetime
from typing import Any

from dhen.config import DhenConfig, ModelConfig
from dhen.cost import dense_parameters, embedding_parameters, headline_flops
from dhen.model import model_cost, parse_model
from dhen.values import parse
from spaces.space import Candidate, Point, Space
from trials.cluster.machine import Precision
from trials.data.cache import PreparedLog
from trials.job import Job, TrainingConfig, check_order
from trials.record import JobSummary, Origin, Refit, TrialKind, TrialRecord
from trials.serving_limits import weights_bytes
from trials.strategy import named

REFIT_AVERAGE = 4
"""Largest number of the last evaluations of a refit whose weights' mean is kept, where the training says nothing:
no rows are left that could tell the better ones apart (docs/benchmarks/refit.md). It is half of them at most."""
MOST_COPIED = 2 * 1024**3
"""Largest number of bytes of weights, in fp32, that a refit copies into host memory for that mean, which no plan
counts: with larger tables it is of fewer evaluations, or the last weights are kept."""


def job_on(
    log: PreparedLog, model: ModelConfig, training: TrainingConfig, seed: int, precision: Precision
) -> Job:
    """The job of training a model on a log; `precision` is what `auto` means.

    Raises:
        UserError: for settings that do not go together.
    """
    check_order(log.features, training)
    return Job(
        model=model,
        features=log.features,
        log=log.fingerprint,
        training=training.resolved(log.manifest.rows["train"], precision),
        seed=seed,
    )


def candidate_training(shared: TrainingConfig, candidate: Candidate) -> TrainingConfig:
    """Training settings that all candidates share, with those that the space decides here; the rest is open."""
    return parse(TrainingConfig, shared.to_dict() | candidate.training, "space")


def on_all_rows(training: TrainingConfig, candidate: Candidate) -> TrainingConfig:
    """A candidate's training on all rows of the log, with what is left open; `training` is shared by all."""
    return candidate_training(training, candidate).replace(train_fraction=1.0)


def candidate_of(trial: TrialRecord, space: Space) -> Candidate:
    """What a candidate's trial stands for: its point, or the proposal outside the space that it is."""
    if not trial.outside_space:
        return space.decode(trial.point)
    assert trial.origin.proposal is not None
    model = parse_model(trial.job.model, "ledger")
    assert isinstance(model, DhenConfig), "no other model is taken as a candidate"
    return Candidate(model=model, training=trial.origin.proposal.training)


def trained_job(
    trial: TrialRecord, log: PreparedLog, *, seed_shift: int = 0, origin: int | None = None
) -> Job:
    """The job that a finished trial has done, with its seed moved by `seed_shift`, or at an earlier origin. An
    average has none; its members have."""
    return Job(
        model=parse_model(trial.job.model, "ledger"),
        features=log.features,
        log=log.fingerprint,
        training=parse(TrainingConfig, trial.job.training, "ledger"),
        seed=trial.job.seed + seed_shift,
        origin=origin if origin is not None else trial.job.origin,
        refit=trial.job.refit,
        teacher=trial.job.teacher,
        period=trial.job.period,
    )


def refit_job(network: TrialRecord, log: PreparedLog, *, seed_shift: int = 0) -> Job:
    """Returns the job of training a network once more, on the rows of training and validation together, as long as
    its training had taken to its best."""
    job, rows = trained_job(network, log, seed_shift=seed_shift), log.manifest.rows
    training = job.training
    assert training.evaluate_every is not None
    longer = (rows["train"] + rows["validation"]) / rows["train"]
    technique = network.plan.technique
    # tables that lie below the device's memory, or on servers, are too large for copies of them
    copied = not training.tables.on_servers and (technique is None or named(technique).tables == "device")
    refit = Refit.of(network.result.curve)
    last = min(REFIT_AVERAGE, refit.evaluations // 2, MOST_COPIED // max(1, network.job.weights_bytes or 0))
    refit = refit.replace(
        evaluate_every=max(1, round(longer * training.evaluate_every)),
        weight_average=last if copied and last > 1 and not training.weight_average else None,
    )
    return job.replace(refit=refit)


def new_record(number: int, kind: TrialKind, point: Point, job: Job, **origin: Any) -> TrialRecord:
    """A trial that is about to start, with all that is known before its plan; `origin` has fields of `Origin`."""
    cost = model_cost(job.model, job.features)
    return TrialRecord(
        number=number,
        kind=kind,
        point=point,
        origin=Origin(started_at=now(), **origin),
        job=JobSummary(
            fingerprint=job.fingerprint,
            seed=job.seed,
            model=job.model.to_dict(),
            training=job.training.to_dict(),
            cost=cost,
            flops=headline_flops(cost),
            parameters=dense_parameters(cost),
            embedding_parameters=embedding_parameters(cost),
            weights_bytes=weights_bytes(cost),
            origin=job.origin,
            refit=job.refit,
            teacher=job.teacher,
            period=job.period,
        ),
    )


def now() -> str:
    """This moment as records have it: ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
