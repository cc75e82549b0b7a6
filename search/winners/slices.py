"""NE by slice: where a winner is better than the baseline, and where it is worse, by the values of a column.

Made from the logits that `dhen-search confirm` kept of the test split: nothing is trained or scored. Intervals
are over seeds and blocks of a slice's rows (`search.winners.bootstrap`), p after Holm's correction over slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.special import expit

from dhen.errors import UserError
from dhen.values import Value
from search.directory import trial_folder
from search.winners.bootstrap import Estimate, Floats, holm, paired_bootstrap
from search.winners.confirm import better
from search.winners.groups import Groups, groups_of
from search.winners.losses import Blocks, blocks_of, losses
from search.winners.retraining import FOLDER, SPLIT
from trials.data.cache import PreparedLog
from trials.data.weights import example_weights
from trials.metrics import entropy
from trials.record import Better, Comparison, StudyRecord
from trials.scoring import logits_file

MOST = 20
"""Values of a column that are shown; the others are joined."""


class Slice(Value):
    """Rows of the test split with one value, or in one tenth; means over seeds."""

    value: str
    rows: int
    base_rate: float
    ne: float | None
    """Of the winner; None where all labels are equal."""
    baseline_ne: float | None
    calibration: float | None
    """Of the winner: predictions over labels; None without positives."""
    baseline_calibration: float | None
    difference_percent: float
    """NE relative to the baseline's; negative is better."""
    low_percent: float | None
    """Of the 95 % interval; None where all rows lie in one block."""
    high_percent: float | None
    p_adjusted: float | None
    better: Better
    """Than the baseline, on this slice."""


class Slices(Value):
    """A winner and the baseline on the slices of a column."""

    trial: int
    baseline: int
    column: str
    seeds: tuple[int, ...]
    slices: tuple[Slice, ...]


class _Sums:
    """Sums over the rows of each group: S seeds, G groups, K blocks."""

    def __init__(self, log: PreparedLog, groups: Groups, blocks: Blocks) -> None:
        split, self._rate = log.split(SPLIT), log.schema.negative_sampling_rate
        self._label_N = np.asarray(split.labels)
        weights = example_weights(split, self._rate)
        self._weight_N = np.ones(split.rows) if weights is None else weights
        self._shape = len(groups.names), blocks.count
        self._cell_N = groups.group_N.astype(np.int64) * blocks.count + blocks.block_N
        self.weight_G = self._by_cell(self._weight_N).sum(axis=1)
        self.positive_G = self._by_cell(self._weight_N * self._label_N).sum(axis=1)
        self.rows_G = np.bincount(groups.group_N, minlength=self._shape[0])

    def of(self, files: Sequence[Path]) -> tuple[Floats, Floats]:
        """Losses (S x G x K) and predicted clicks (mean over seeds, G) of the logits in these files."""
        loss, clicks = [], []
        for file in files:
            logit_N = np.load(file, mmap_mode="r", allow_pickle=False)
            loss.append(self._by_cell(self._weight_N * losses(logit_N, self._label_N, self._rate)))
            p_N = expit(logit_N.astype(np.float64) + np.log(self._rate))
            clicks.append(self._by_cell(self._weight_N * p_N).sum(axis=1))
        return np.stack(loss), np.mean(clicks, axis=0)

    def _by_cell(self, value_N: Floats) -> Floats:
        groups, blocks = self._shape
        sums: Floats = np.bincount(self._cell_N, value_N, groups * blocks)
        return sums.reshape(groups, blocks)


def slices(
    study: StudyRecord,
    trial: int,
    log: PreparedLog,
    column: str,
    *,
    most: int = MOST,
    block_by: str | None = None,
) -> Slices:
    """Of a winner that was compared with the baseline.

    Raises:
        UserError: where it was not, its logits are gone, or the column is not one of the log's.
    """
    comparison = study.comparison(trial)
    if comparison is None or study.baseline is None:
        raise UserError(
            f"trial {trial} was not compared with the baseline yet; "
            f"`dhen-search confirm {study.directory}` does that."
        )
    split = log.split(SPLIT)
    groups, blocks = groups_of(log, split, column, most), blocks_of(log, split, block_by)
    sums = _Sums(log, groups, blocks)
    own = sums.of(_logits(study, trial, comparison))
    reference = sums.of(_logits(study, study.baseline, comparison))
    estimates = [_estimate(own[0][:, g], reference[0][:, g]) for g in range(len(groups.names))]
    known = [each.p for each in estimates if each is not None]
    adjusted = iter(holm(known))
    found = [
        _slice(name, g, sums, own, reference, estimates[g], next(adjusted) if estimates[g] else None)
        for g, name in enumerate(groups.names)
    ]
    return Slices(
        trial=trial, baseline=study.baseline, column=column, seeds=comparison.seeds, slices=tuple(found)
    )


def _logits(study: StudyRecord, trial: int, comparison: Comparison) -> list[Path]:
    """Of its retrainings, by seed."""
    numbers = {each.seed: each.number for each in study.retrainings if each.of == trial and not each.removed}
    folder = Path(study.directory) / FOLDER
    files = [logits_file(trial_folder(folder, numbers[seed]), SPLIT) for seed in comparison.seeds]
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise UserError(f"{missing} is missing; `dhen-search confirm {study.directory}` makes it again.")
    return files


def _estimate(own_SK: Floats, reference_SK: Floats) -> Estimate | None:
    """Over the blocks in which the slice has rows; None where that is one."""
    there = reference_SK.sum(axis=0) > 0.0
    return paired_bootstrap(own_SK[:, there], reference_SK[:, there]) if there.sum() > 1 else None


def _slice(
    name: str,
    group: int,
    sums: _Sums,
    own: tuple[Floats, Floats],
    reference: tuple[Floats, Floats],
    estimate: Estimate | None,
    p_adjusted: float | None,
) -> Slice:
    positive = float(sums.positive_G[group])
    base_rate = positive / float(sums.weight_G[group])
    bits = entropy(base_rate) * float(sums.weight_G[group]) if 0.0 < base_rate < 1.0 else None
    loss, baseline_loss = (float(each[0][:, group].sum(axis=1).mean()) for each in (own, reference))
    clicks, baseline_clicks = (float(each[1][group]) for each in (own, reference))
    low, high = estimate.interval() if estimate is not None else (None, None)
    percent = estimate.percent if estimate is not None else 100.0 * (loss / baseline_loss - 1.0)
    return Slice(
        value=name,
        rows=int(sums.rows_G[group]),
        base_rate=base_rate,
        ne=loss / bits if bits else None,
        baseline_ne=baseline_loss / bits if bits else None,
        calibration=clicks / positive if positive else None,
        baseline_calibration=baseline_clicks / positive if positive else None,
        difference_percent=percent,
        low_percent=low,
        high_percent=high,
        p_adjusted=p_adjusted,
        better=better(percent, p_adjusted) if p_adjusted is not None else Better.CANNOT_TELL,
    )
