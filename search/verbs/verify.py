"""`verify`: does a bundle still give its numbers?"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray

from dhen.averaging import mean_of_logits
from dhen.cost import headline_flops
from dhen.errors import UserError
from dhen.model import model_cost
from search.bundles.bundle import Bundle, Int8Cost, read_bundle
from search.bundles.log_of_bundle import log_of
from search.verbs.data_option import data_option
from trials.data.cache import PreparedLog
from trials.record import Metrics
from trials.training.evaluation import evaluate, logit_metrics
from trials.training.score_weights import score
from trials.training.step import ONE_RANK, PLAIN_DP

NE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-4}
"""Absolute tolerances by precision: what another machine's matmul order and precision may change."""


@click.command(epilog="Example: dhen-search verify runs/demo/best --data log.csv")
@click.argument("bundle", type=click.Path(path_type=Path))
@data_option("The log, to evaluate again: files, a folder, `demo`.")
@click.option("--format", "log_format", help="csv, tsv, parquet, criteo or avazu; found out if not given.")
@click.option("--skip-bad-rows", is_flag=True, help="As the log was prepared.")
def command(bundle: Path, data: tuple[str, ...], log_format: str | None, skip_bad_rows: bool) -> None:
    """Check a bundle's files, costs and stored scores; with --data, evaluate it again and compare NE."""
    opened_bundle = read_bundle(bundle)
    click.echo("files: whole, none altered")
    if opened_bundle.increments:
        click.echo(
            f"increments: {len(opened_bundle.increments)}, up to version {opened_bundle.version.number}"
        )
    flops = sum(headline_flops(model_cost(job.model, job.features)) for job in opened_bundle.info.jobs)
    if flops != opened_bundle.info.flops:
        raise UserError(f"{bundle}: FLOPs are {flops:,.0f} now, {opened_bundle.info.flops:,.0f} at export.")
    click.echo(f"cost: {flops:,.0f} FLOPs per example, as at export")
    click.echo(f"stored examples: scores within {opened_bundle.check():.1e} of those at export")
    log = log_of(opened_bundle, data, format=log_format, skip_bad_rows=skip_bad_rows) if data else None
    for note in log.notes if log else ():
        click.echo(f"note: {note}")
    click.echo(_forward(opened_bundle, log))
    if log is not None:
        _evaluate(opened_bundle, log)


def _forward(bundle: Bundle, log: PreparedLog | None) -> str:
    """The forward time now and at export; another machine, or a busy one, is no mistake of the bundle's."""
    now, before = bundle.forward_time(log), bundle.info.forward
    rows = "validation rows" if log else "stored examples, repeated"
    measured = f"{now}, {rows}" if now else "not measured: this device cannot hold it"
    return f"forward: {measured}; at export {before or 'not measured'}"


def _evaluate(bundle: Bundle, log: PreparedLog) -> None:
    """Prints metrics on the log, compared where it is the log of the bundle."""
    if bundle.info.int8_tables is not None:
        _evaluate_int8(bundle, bundle.info.int8_tables, log)
        return
    same = log.fingerprint == bundle.info.log.fingerprint and not bundle.version.number
    click.echo(
        "log: the one it was trained on" if same else f"log: {_other(bundle)}; nothing to compare with"
    )
    model, period = bundle.model(as_trained=True), bundle.info.jobs[0].period
    if period is not None:
        learnt = (
            f"periods of {period}, each scored before it is trained on" if same else "the bundle as it is"
        )
        click.echo(f"NE is of {learnt}")
    worst = 0.0
    for split, exported in (("validation", bundle.info.validation), ("test", bundle.info.test)):
        now = _ahead(bundle, log, split) if same and period is not None else evaluate(model, log, split)
        click.echo(_line(split, now, exported if same else None))
        if same and exported is not None:
            worst = max(worst, abs(now.ne - exported.ne))
    _check_difference(bundle, worst)


def _evaluate_int8(bundle: Bundle, cost: Int8Cost, log: PreparedLog) -> None:
    """Prints metrics of tables of 8 bits on validation, compared where they were measured on this log."""
    same = log.fingerprint == cost.log
    click.echo(
        f"log: {'the one that its tables were measured on' if same else 'another one; nothing to compare with'}"
    )
    now = evaluate(bundle.model(as_trained=True), log, "validation")
    click.echo(_line("validation", now, cost.validation if same else None))
    _check_difference(bundle, abs(now.ne - cost.validation.ne) if same else 0.0)


def _check_difference(bundle: Bundle, worst: float) -> None:
    """Ends with exit code 1 where NE differs from the export's by more than machines may."""
    tolerance = max(NE_TOLERANCE[job.training.precision] for job in bundle.info.jobs)
    if worst > tolerance:
        click.echo(f"NE differs by {worst:.2g} from the export's (tolerance {tolerance})", err=True)
        sys.exit(1)


def _ahead(bundle: Bundle, log: PreparedLog, split_name: str) -> Metrics:
    """Returns metrics of the periods of a split, each scored before the bundle's networks are trained on it."""
    logits = list[NDArray[np.float32]]()
    for member, job in enumerate(bundle.info.jobs):
        score(
            job,
            bundle.weights(member),
            log,
            split_name,
            ranks=ONE_RANK,
            strategy=PLAIN_DP,
            cluster=None,
            keep=lambda logit_N: logits.append(logit_N.numpy()),
        )
    rate = log.schema.negative_sampling_rate
    return logit_metrics(torch.from_numpy(mean_of_logits(logits, rate)), log.split(split_name), log)


def _other(bundle: Bundle) -> str:
    """Why metrics on a log are not those at export."""
    number = bundle.version.number
    return f"the bundle has learnt since its export (version {number})" if number else "another one"


def _line(split: str, now: Metrics, exported: Metrics | None) -> str:
    line = f"{split}: NE {now.ne:.5f}, log loss {now.log_loss:.5f}, AUC {now.auc:.5f} ({now.examples:,} rows)"
    return line if exported is None else f"{line}; at export NE {exported.ne:.5f}"
