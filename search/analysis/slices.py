"""NE by slice: where a winner is better than the baseline, and where it is worse, by the values of a column.

Slices are made from the logits that `dhen-search confirm` kept of the test split: nothing is trained or scored.
Intervals are over seeds and blocks of a slice's rows (`search.analysis.statistics`), p after Holm's
correction over slices.

Shapes: S seeds, G groups (a slice each), K blocks of rows, C cells (a block of a group), N rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from dashboards.rows import winner_reasons
from dhen.errors import UserError
from dhen.members import mean_of_logits
from search.analysis.confirm import better, retrained_job
from search.analysis.losses import blocks_of, groups_of, losses
from search.analysis.statistics import BootstrapDifference, holm, paired_bootstrap
from search.bundles.bundle import Bundle
from search.execution.retraining import SPLIT
from search.execution.trainer import refit_job, trained_job
from search.run_directory import folder_of
from trials.cluster.machine import device
from trials.data.prepared_log import PreparedLog
from trials.records.events import logits_file
from trials.records.findings import Slice, Slices, WinnerVerdict
from trials.records.metrics import Floats, entropy, example_weights
from trials.records.study_record import Comparison, StudyRecord
from trials.store.weights import read_logits
from trials.training.evaluation import evaluate

MOST = 20
"""Number of values of a column that are shown; the others are joined."""


class _Model(NamedTuple):
    """Sums over a model's predictions, by seed (S), group of rows (G) and block (K)."""

    loss_SGK: Floats
    clicks_G: Floats
    """Predicted clicks, the mean over seeds."""


class _Sums:
    """Sums over the rows of each group and block of the test split."""

    def __init__(self, log: PreparedLog, column: str, most: int, block_by: str | None) -> None:
        split = log.split(SPLIT)
        group_N, self.names = groups_of(log, split, column, most)
        blocks = blocks_of(log, split, block_by)
        self.blocked_by = blocks.by
        self._rate = log.schema.negative_sampling_rate
        self._label_N = np.asarray(split.labels)
        weights = example_weights(split.labels, split.weight, self._rate)
        self._weight_N = np.ones(split.rows) if weights is None else weights
        self._shape = len(self.names), blocks.count
        self._cell_N = group_N.astype(np.int64) * blocks.count + blocks.block_N
        self.weight_G = self._by_cell(self._weight_N).sum(axis=1)
        self.positive_G = self._by_cell(self._weight_N * self._label_N).sum(axis=1)
        self.rows_G = np.bincount(group_N, minlength=self._shape[0])

    def of(self, logits: Iterable[NDArray[np.float32]]) -> _Model:
        """Sums of a model's losses, from its logits (N), by seed."""
        loss, clicks = [], []
        for logit_N in logits:
            loss.append(self._by_cell(self._weight_N * losses(logit_N, self._label_N, self._rate)))
            p_N = expit(logit_N.astype(np.float64) + np.log(self._rate))
            clicks.append(self._by_cell(self._weight_N * p_N).sum(axis=1))
        return _Model(np.stack(loss), np.mean(clicks, axis=0))

    def quality(self, model: _Model | None, group: int) -> tuple[float | None, float | None]:
        """NE and calibration of a model, if they are defined."""
        if model is None:
            return None, None
        base_rate, positive, ne = self.base_rate(group), float(self.positive_G[group]), None
        if 0.0 < base_rate < 1.0:
            loss = float(model.loss_SGK[:, group].sum(axis=1).mean())
            ne = loss / float(self.weight_G[group]) / entropy(base_rate)
        return ne, float(model.clicks_G[group]) / positive if positive else None

    def base_rate(self, group: int) -> float:
        """Weighted fraction of positives; 0 if no row counts."""
        weight = float(self.weight_G[group])
        return float(self.positive_G[group]) / weight if weight else 0.0

    def _by_cell(self, value_N: Floats) -> Floats:
        groups, blocks = self._shape
        sums_C = np.bincount(self._cell_N, value_N, groups * blocks).astype(np.float64)
        return sums_C.reshape(groups, blocks)


def slices(
    study: StudyRecord,
    trial: int,
    log: PreparedLog,
    column: str,
    *,
    most: int = MOST,
    block_by: str | None = None,
) -> Slices:
    """The slices of a winner that was compared with the baseline; by default over the blocks of that comparison.

    Raises:
        UserError: if it was not compared, its logits are gone, or the column is not one of the log's.
    """
    comparison = study.comparison(trial)
    winners = winner_reasons(study)
    if winners and trial not in winners:
        what = (
            "the baseline itself"
            if trial == study.baseline
            else "none of the winners that are compared with it"
        )
        named = ", ".join(map(str, winners))
        raise UserError(f"trial {trial} is {what}: name a winner, --pick {named}.")
    if comparison is None or study.baseline is None:
        raise UserError(
            f"trial {trial} was not compared with the baseline yet; "
            f"`dhen-search confirm {study.directory}` does that."
        )
    sums = _Sums(log, column, most, block_by or comparison.blocked_by)
    winner, reference = (
        sums.of(_kept_logits(study, number, log, comparison)) for number in (trial, study.baseline)
    )
    rows = _slices(sums, winner, reference)
    return Slices(
        trial=trial,
        baseline=study.baseline,
        column=column,
        blocked_by=sums.blocked_by,
        seeds=comparison.seeds,
        slices=rows,
    )


def bundle_slices(bundle: Bundle, log: PreparedLog, column: str, *, most: int = MOST) -> Slices:
    """The slices of a bundle on the test split of a log in its encoding; there is no baseline to compare with.

    Raises:
        UserError: if the column is not one of the log's.
    """
    logits = list[NDArray[np.float32]]()
    sums = _Sums(log, column, most, None)
    model = bundle.model(as_trained=True).to(device())
    evaluate(model, log, SPLIT, keep=lambda logit_N: logits.append(logit_N.cpu().numpy()))
    rows = _slices(sums, sums.of(logits), None)
    seeds = tuple(sorted({job.seed for job in bundle.info.jobs}))
    return Slices(trial=bundle.info.trial, column=column, seeds=seeds, slices=rows)


def _kept_logits(
    study: StudyRecord, trial: int, log: PreparedLog, comparison: Comparison
) -> Iterator[NDArray[np.float32]]:
    """Yields the logits of a trial's retrainings for a comparison, by seed; for an average, of the mean of its
    members'."""
    retrainings = {record.job.fingerprint: record for record in study.retrainings}
    networks = study.networks(study.trial(trial))
    job_of = refit_job if comparison.refit else trained_job
    again = f"`dhen-search confirm {study.directory}` makes it again"
    for seed in comparison.seeds:
        logits = []
        for network in networks:
            retraining = retrainings.get(retrained_job(network, study, log, seed, job_of).fingerprint)
            if retraining is None:
                raise UserError(f"a retraining that winners were compared by is not in the ledger; {again}.")
            file = logits_file(folder_of(Path(study.directory), retraining), SPLIT)
            if not file.exists():
                raise UserError(f"{file} is missing; {again}.")
            logits.append(read_logits(file))
        yield mean_of_logits(logits, log.schema.negative_sampling_rate)


def _slices(sums: _Sums, model: _Model, reference: _Model | None) -> tuple[Slice, ...]:
    estimates: list[BootstrapDifference | None] = []
    for group in range(len(sums.names)):
        estimate = None
        if reference is not None:
            loss_SK, reference_SK = model.loss_SGK[:, group], reference.loss_SGK[:, group]
            has_rows_K = reference_SK.sum(axis=0) > 0.0
            if has_rows_K.sum() > 1:  # rows in a single block show no spread
                estimate = paired_bootstrap(loss_SK[:, has_rows_K], reference_SK[:, has_rows_K])
        estimates.append(estimate)
    adjusted = iter(holm([estimate.p for estimate in estimates if estimate is not None]))
    rows = []
    for group, estimate in enumerate(estimates):
        difference: dict[str, Any] = {"better": WinnerVerdict.CANNOT_TELL}
        if estimate is not None:
            p_adjusted, (low, high) = next(adjusted), estimate.interval()
            difference = {
                "difference_percent": estimate.percent,
                "low_percent": low,
                "high_percent": high,
                "p_adjusted": p_adjusted,
                "better": better(estimate.percent, p_adjusted),
            }
        ne, calibration = sums.quality(model, group)
        baseline_ne, baseline_calibration = sums.quality(reference, group)
        row = Slice(
            value=sums.names[group],
            rows=int(sums.rows_G[group]),
            base_rate=sums.base_rate(group),
            ne=ne,
            calibration=calibration,
            baseline_ne=baseline_ne,
            baseline_calibration=baseline_calibration,
            **difference,
        )
        rows.append(row)
    return tuple(rows)
