"""Raw rows in memory have the probabilities that `predict` writes for the same rows in a file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import Run

from search.bundles.bundle import read_bundle
from search.bundles.scorer import Scorer


@pytest.fixture(scope="module")
def scorer(study: Path) -> Scorer:
    return Scorer(read_bundle(study / "best"))


@pytest.fixture(scope="module")
def predicted(
    study: Path, click_log: Path, dhen_search: Run, tmp_path_factory: pytest.TempPathFactory
) -> np.ndarray:
    out = tmp_path_factory.mktemp("scores") / "scores.csv"
    dhen_search("predict", study / "best", "--data", click_log, "--out", out)
    return pd.read_csv(out)["score"].to_numpy()


def test_a_data_frame_scores_as_the_file_it_was_read_from(
    scorer: Scorer, click_log: Path, predicted: np.ndarray
) -> None:
    assert scorer.score(pd.read_csv(click_log)) == pytest.approx(predicted, rel=1e-6)


def test_values_of_several_types_score_as_their_text(
    scorer: Scorer, click_log: Path, predicted: np.ndarray
) -> None:
    """In a column and in a list; one row's types change no other row's score."""
    text = pd.read_csv(click_log, dtype=str, keep_default_na=False)
    mixed = text.astype(object)
    mixed.loc[::2, "price"] = [float(price) if price else None for price in text.loc[::2, "price"]]
    assert scorer.score(mixed) == pytest.approx(predicted, rel=1e-6)
    rows = text.head(3).assign(tags=["t1|t2", "3", ""])
    lists = rows.astype(object)
    lists["tags"] = [["t1", "t2"], [3], None]
    assert scorer.score(lists) == pytest.approx(scorer.score(rows), rel=1e-6)


def test_ids_of_which_one_is_missing_score_as_the_file_they_were_read_from(
    dhen_search: Run, tmp_path: Path
) -> None:
    """A CSV has 3.0 and True where a data frame of it has numbers and truth values."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"shop": rng.integers(0, 9, 3000).astype(float), "member": rng.random(3000) < 0.5})
    odds = (frame["shop"] - 4.0) / 2 + frame["member"]
    frame["click"] = (rng.random(3000) < 1 / (1 + np.exp(-odds))).astype(int)
    frame.loc[::50, "shop"] = np.nan
    log, out = tmp_path / "log.csv", tmp_path / "scores.csv"
    frame.to_csv(log, index=False)
    assert "3.0" in log.read_text()
    dhen_search("prepare", log, "--out", tmp_path / "log")
    schema = (tmp_path / "log" / "schema.yaml").read_text()
    assert "shop: {role: categorical" in schema or "shop: {role: numeric" in schema
    ids = re.sub(r"shop: \{.*\}", "shop: {role: categorical}", schema)
    (tmp_path / "mine.yaml").write_text(ids)
    dhen_search("prepare", log, "--schema", tmp_path / "mine.yaml", "--out", tmp_path / "prepared")
    words = ("training.epochs=1", "--data", tmp_path / "prepared", "--out", tmp_path / "bundle")
    dhen_search("train", "dlrm", *words)
    dhen_search("predict", tmp_path / "bundle", "--data", log, "--out", out)
    scores = pd.read_csv(out)["score"].to_numpy()
    scorer = Scorer(read_bundle(tmp_path / "bundle"))
    assert scorer.score(pd.read_csv(log)) == pytest.approx(scores, rel=1e-6)
    assert scorer.score(pd.read_csv(log, dtype=str)) == pytest.approx(scores, rel=1e-6)
    assert np.std(scores) > 0.1
