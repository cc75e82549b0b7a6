"""A log of which a quarter of the negatives was kept, the whole way: bundle, `verify`, `predict`."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest
from command_line import Run, write_log

from search.bundles.bundle import read_bundle

RATE = 0.25
ROWS = 12_000


@pytest.fixture(scope="module")
def folder(dhen_search: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log as it was, the rows of it that were kept, a schema that says so, and a network of them."""
    folder = tmp_path_factory.mktemp("sampled")
    header, *rows = write_log(folder / "whole.csv", ROWS).read_text().splitlines()
    rng = random.Random(0)
    kept = [row for row in rows if row.startswith("1,") or rng.random() < RATE]
    (folder / "kept.csv").write_text("\n".join([header, *kept]) + "\n")
    dhen_search("prepare", folder / "kept.csv", "--out", folder / "as_found")
    schema = (folder / "as_found" / "schema.yaml").read_text()
    assert "negative_sampling_rate: 1.0" in schema
    (folder / "schema.yaml").write_text(
        schema.replace("negative_sampling_rate: 1.0", f"negative_sampling_rate: {RATE}")
    )
    dhen_search(
        "prepare", folder / "kept.csv", "--schema", folder / "schema.yaml", "--out", folder / "prepared"
    )
    words = ("--data", folder / "prepared", "--out", folder / "bundle", "training.epochs=2")
    dhen_search("train", "dlrm", *words)
    return folder


def clicks(path: Path) -> np.ndarray:
    return np.array([float(row["click"]) for row in csv.DictReader(path.read_text().splitlines())])


def scores(path: Path) -> np.ndarray:
    return np.array([float(row["score"]) for row in csv.DictReader(path.read_text().splitlines())])


def test_base_rates_are_of_the_log_before_sampling(folder: Path) -> None:
    whole, kept = clicks(folder / "whole.csv"), clicks(folder / "kept.csv")
    assert kept.mean() > 1.8 * whole.mean()  # so that what follows could fail
    assert read_bundle(folder / "bundle").info.log.base_rate["train"] == pytest.approx(whole.mean(), rel=0.1)


def test_ne_is_that_of_corrected_scores_with_negatives_counted_by_their_weight(
    folder: Path, dhen_search: Run
) -> None:
    """From what `predict` writes and the formula, on the rows of the test split: the last in time."""
    out = folder / "kept_scores.csv"
    dhen_search("predict", folder / "bundle", "--data", folder / "kept.csv", "--out", out)
    info = read_bundle(folder / "bundle").info
    rows = info.log.rows["test"]
    label, p = clicks(folder / "kept.csv")[-rows:], scores(out)[-rows:]
    weight = np.where(label > 0, 1.0, 1.0 / RATE)
    loss = -np.average(np.where(label > 0, np.log(p), np.log(1 - p)), weights=weight)
    base = np.average(label, weights=weight)
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    assert info.test is not None
    assert info.test.ne == pytest.approx(loss / entropy, rel=1e-3)
    assert info.test.calibration == pytest.approx(np.average(p, weights=weight) / base, rel=1e-3)


def test_scores_of_unsampled_rows_are_calibrated(folder: Path, dhen_search: Run) -> None:
    out = folder / "whole_scores.csv"
    dhen_search("predict", folder / "bundle", "--data", folder / "whole.csv", "--out", out)
    calibration = scores(out).mean() / clicks(folder / "whole.csv").mean()
    assert calibration == pytest.approx(1.0, abs=0.1)  # uncorrected it would be about two


def test_verify_finds_the_bundles_numbers_again(folder: Path, dhen_search: Run) -> None:
    said = dhen_search("verify", folder / "bundle", "--data", folder / "prepared").stdout
    assert "the one it was trained on" in said
