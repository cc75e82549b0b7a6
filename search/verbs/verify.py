"""`verify`: does a bundle still give its numbers?"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray

from dhen.cost import headline_flops
from dhen.errors import UserError
from dhen.members import mean_of_logits
from dhen.model import model_cost
from search.bundles.bundle import Bundle, read_bundle
from search.bundles.export import log_of
from search.log_config import data_option, read_options
from search.verbs.output import PATH, VerifiedBundle, VerifiedSplit, json_option, print_json
from trials.data.prepared_log import PreparedLog
from trials.records.trial_record import Metrics
from trials.training.evaluation import evaluate, logit_metrics
from trials.training.scoring import score
from trials.training.step import ONE_RANK, PLAIN_DP

OUTPUT = VerifiedBundle
EXACT, ROUNDED, BF16 = 1e-5, 1e-4, 5e-4
"""Absolute tolerances of NE, as another machine sums in another order: in fp32; if embeddings were sent in fewer
bits, or each period is trained on; and in bf16."""


@click.command(epilog="Example: dhen-search verify runs/demo/best --data log.csv")
@click.argument("bundle", type=PATH)
@click.argument("words", nargs=-1, metavar="[csv.KEY=value ...]")
@data_option("The log, to evaluate again: files, a folder, `demo`.")
@click.option("--format", "log_format", help="csv, tsv, parquet, criteo or avazu; found out if not given.")
@click.option("--skip-bad-rows", is_flag=True, help="As the log was prepared.")
@json_option("What holds and what does not, as JSON.")
def command(
    bundle: Path,
    words: tuple[str, ...],
    data: tuple[str, ...],
    log_format: str | None,
    skip_bad_rows: bool,
    as_json: bool,
) -> None:
    """Check a bundle's files, costs and stored scores; with --data, evaluate it again and compare NE."""

    def say(sentence: str) -> None:
        click.echo(sentence, err=as_json)

    opened = read_bundle(bundle)
    say("files: whole, none altered")
    if opened.increments:
        say(f"increments: {len(opened.increments)}, up to version {opened.version.number}")
    flops = sum(headline_flops(model_cost(job.model, job.features)) for job in opened.info.jobs)
    if flops != opened.info.flops:
        raise UserError(f"{bundle}: FLOPs are {flops:,.0f} now, {opened.info.flops:,.0f} at export.")
    say(f"cost: {flops:,.0f} FLOPs per example, as at export")
    model = opened.model()
    opened.check_finite(model)
    scores_within = opened.check(model)
    del model  # tables may take most of the memory
    say(f"stored examples: scores within {scores_within:.1e} of those at export")
    given = {"format": log_format, "skip_bad_rows": skip_bad_rows or None}
    options = read_options(words, ("csv", *given), **given)
    log = log_of(opened, data, options) if data else None
    for note in log.notes if log else ():
        say(f"note: {note}")
    forward = opened.forward_time(log)
    # another machine, or a busy one, is no mistake of the bundle's
    rows = "validation rows" if log else "stored examples, repeated"
    measured = f"{forward}, {rows}" if forward else "not measured: this device cannot hold it"
    say(f"forward: {measured}; at export {opened.info.forward or 'not measured'}")
    splits = _evaluate(opened, log, say) if log is not None else {}
    ne_off = max((ne_gap(split.now, split.exported) for split in splits.values()), default=0.0)
    tolerance = tolerance_of(opened)
    verified = VerifiedBundle(
        bundle=str(bundle),
        version=opened.version.number,
        flops=flops,
        scores_within=scores_within,
        forward=forward,
        forward_exported=opened.info.forward,
        same_log=_is_own_log(opened, log) if log is not None else None,
        splits=splits,
        ne_off=ne_off,
        tolerance=tolerance,
        holds=ne_off <= tolerance,
    )
    if as_json:
        print_json(verified)
    if not verified.holds:
        click.echo(f"NE differs by {verified.ne_off:.2g} from the export's (tolerance {tolerance})", err=True)
        sys.exit(1)


def tolerance_of(bundle: Bundle) -> float:
    """Returns by how much NE may differ from that at export."""
    jobs = bundle.info.jobs
    if any(job.training.precision == "bf16" for job in jobs):
        return BF16
    exact = all(job.training.all_to_all_precision == "fp32" and job.period is None for job in jobs)
    return EXACT if exact else ROUNDED


def ne_gap(now: Metrics, exported: Metrics | None) -> float:
    """Returns the difference of NE from that at export; infinite if one of the two is NaN."""
    if exported is None or (math.isnan(now.ne) and math.isnan(exported.ne)):
        return 0.0
    off = abs(now.ne - exported.ne)
    return math.inf if math.isnan(off) else off


def _is_own_log(bundle: Bundle, log: PreparedLog) -> bool:
    """Whether metrics on a log can be compared with those that the bundle has; those of tables of 8 bits may have
    been measured on another log than it was trained on."""
    int8 = bundle.info.int8_tables
    own = int8.log if int8 is not None else bundle.info.log.fingerprint
    return log.fingerprint == own and not bundle.version.number


def _evaluate(bundle: Bundle, log: PreparedLog, say: Callable[[str], None]) -> dict[str, VerifiedSplit]:
    """Says metrics on the log, compared if it is the log of the bundle, and returns them by split; of tables of
    8 bits on the split that they were measured on."""
    info, same, int8 = bundle.info, _is_own_log(bundle, log), bundle.info.int8_tables
    own, other = "the one it was trained on", "another one"
    if int8 is not None:
        own = "the one that its tables were measured on"
    elif bundle.version.number:
        other = f"the bundle has learnt since its export (version {bundle.version.number})"
    say(f"log: {own if same else f'{other}; nothing to compare with'}")
    model, period = bundle.model(as_trained=True), None if int8 is not None else info.jobs[0].period
    if period is not None:
        learnt = (
            f"periods of {period}, each scored before it is trained on" if same else "the bundle as it is"
        )
        say(f"NE is of {learnt}")
    at_export = {"validation": info.validation, "test": info.test}
    if int8 is not None:
        at_export = {int8.split: int8.int8}
    elif info.has_seen_validation:
        at_export["validation"] = None
        if same:
            say("the network was trained on the rows of validation too: only NE on test compares")
    splits = {}
    for split, exported in at_export.items():
        now = _ahead(bundle, log, split) if same and period is not None else evaluate(model, log, split)
        splits[split] = VerifiedSplit(now=now, exported=exported if same else None)
        say(split_line(split, now, splits[split].exported, tolerance_of(bundle)))
    return splits


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


def split_line(split: str, now: Metrics, exported: Metrics | None, tolerance: float) -> str:
    """Metrics now; beside them another NE at export stands only if the bundle fails for it."""
    line = f"{split}: NE {now.ne:.5f}, log loss {now.log_loss:.5f}, AUC {now.auc:.5f} ({now.examples:,} rows)"
    if exported is None:
        return line
    before = f"{exported.ne:.5f}"
    if before != f"{now.ne:.5f}" and ne_gap(now, exported) <= tolerance:
        return f"{line}; at export NE within {tolerance} of it"
    return f"{line}; at export NE {before}"
