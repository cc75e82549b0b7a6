"""The ledger keeps what was worked out of winners."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import bare

from trials.records.findings import AblatedPart, Ablation, MeanInterval, Slice, Slices, WinnerVerdict
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger, StudySetting

CLUSTER = {"name": "small", "hosts": 1, "gpus_per_host": 1, "hbm": 2**30}
SETTING = StudySetting(directory="/runs/a", log="l", features={}, seed=0, version=1, cluster=CLUSTER)
PART = AblatedPart(
    removed="layer0", ne_percent=MeanInterval(mean=0.5, low=0.1, high=0.9), flops=1e5, flops_percent=9.0
)
ROW = Slice(
    value="a",
    rows=10,
    base_rate=0.1,
    ne=0.9,
    baseline_ne=None,
    calibration=None,
    baseline_calibration=1.0,
    better=WinnerVerdict.CANNOT_TELL,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(sqlite_url(tmp_path / "study.db"), "a")
    ledger.settle(SETTING)
    for number in (1, 2):
        ledger.save(bare(number, ne=0.8, flops=1e6))
    return ledger


def ablation(trial: int, *seeds: int) -> Ablation:
    return Ablation(trial=trial, seeds=seeds, flops=1e6, parts=(PART,))


def slices(trial: int, column: str, *seeds: int) -> Slices:
    return Slices(trial=trial, baseline=2, column=column, blocked_by="time", seeds=seeds, slices=(ROW,))


def test_the_last_one_of_each_trial_and_column_comes_back_as_it_was(ledger: Ledger) -> None:
    kept = [slices(2, "site", 1), slices(1, "site", 1, 2), slices(1, "hour", 1)]
    for each in (ablation(2, 1), ablation(1, 1), ablation(1, 1, 2), slices(1, "site", 1), *kept):
        ledger.keep_analysis(each)
    assert ledger.ablations() == (ablation(1, 1, 2), ablation(2, 1))
    assert ledger.slices() == (kept[2], kept[1], kept[0])
    other = Ledger(ledger.url, "b")
    assert (other.ablations(), other.slices()) == ((), ())
