"""Labels that a teacher has softened: the mean of label and prediction, in training rows alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_processes import small_log

from dhen.errors import UserError
from trials.data.log_views import TaughtLog, save_teacher
from trials.data.prepared_log import PreparedLog


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedLog:
    return small_log(tmp_path)


def test_labels_of_training_rows_are_the_mean_of_label_and_prediction(
    prepared: PreparedLog, tmp_path: Path
) -> None:
    file = tmp_path / "teachers" / "of.npy"
    labels_N = np.array(prepared.split("train").labels)
    taught_N = np.random.default_rng(0).random(len(labels_N)).astype(np.float32)
    save_teacher(taught_N, file)
    taught = TaughtLog(prepared, file)
    np.testing.assert_allclose(taught.split("train").labels, (labels_N + taught_N) / 2, rtol=1e-6)
    assert taught.split("train").labels.dtype == np.float32
    for split in ("validation", "test"):
        np.testing.assert_array_equal(taught.split(split).labels, prepared.split(split).labels)


def test_predictions_that_are_gone_or_of_other_rows_are_told(prepared: PreparedLog, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="what the teacher predicts is gone"):
        TaughtLog(prepared, tmp_path / "none.npy")
    save_teacher(np.zeros(3, np.float32), tmp_path / "few.npy")
    rows = prepared.manifest.rows["train"]
    with pytest.raises(UserError, match=rf"\(3,\) predictions, and the log has {rows} training rows"):
        TaughtLog(prepared, tmp_path / "few.npy")
