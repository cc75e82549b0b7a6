"""When a training ends: its passes are over, NE has not improved for a while, or rows are learnt by heart."""

from __future__ import annotations

import random
import time

import pytest

from dhen.model import parse_model
from search.execution.trainer import job_on
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.events import EvaluationEvent, Event, TrainingEvent
from trials.records.job import TrainingConfig
from trials.training.loop import BY_HEART, train

MODEL = parse_model({"embedding_dim": 16, "layers": [{"modules": ["mlp"]}]}, "test")


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    """Labels that nothing explains, and ids that come four times each: all that can be learnt is the rows."""
    folder, draw = tmp_path_factory.mktemp("noise"), random.Random(0)
    rows = [f"{draw.randint(0, 1)},u{number % 500},v{number % 499}\n" for number in range(2000)]
    (folder / "log.csv").write_text("click,user,item\n" + "".join(rows))
    return prepare([folder / "log.csv"], out=folder / "prepared")


def nes(log: PreparedLog, **settings: object) -> list[float]:
    """NE on validation at each evaluation of a training, one per pass."""
    config = TrainingConfig.model_validate(
        {"epochs": 20, "evaluate_every": log.manifest.rows["train"], "batch_size": 50, "precision": "fp32"}
        | settings
    )
    events: list[Event] = []
    job = job_on(log, MODEL, config, 0, "fp32")
    train(job, log, events.append, keep=lambda weights: None, progress_seconds=1e9)
    return [event.point.validation.ne for event in events if isinstance(event, EvaluationEvent)]


def test_a_training_that_learns_rows_by_heart_ends(noise: PreparedLog) -> None:
    *before, last = nes(noise, patience=20)
    assert len(before) < 19
    assert last >= BY_HEART * min(before)
    assert all(ne < BY_HEART * min(before[: index + 1]) for index, ne in enumerate(before))


@pytest.mark.parametrize("patience", [1, 3])
def test_a_training_ends_when_ne_has_not_improved_for_so_many_evaluations(
    noise: PreparedLog, patience: int
) -> None:
    slow = {"learning_rate": 1e-4, "embedding_learning_rate": 0.01}
    curve = nes(noise, patience=patience, **slow)
    assert len(curve) < 20
    assert len(curve) - 1 - curve.index(min(curve)) == patience


def test_a_training_without_an_end_of_its_own_has_all_passes(noise: PreparedLog) -> None:
    assert len(nes(noise, epochs=3, patience=20, learning_rate=1e-5, embedding_learning_rate=1e-4)) == 3


def test_a_training_whose_time_is_over_ends_where_it_stands_with_what_it_has_learnt(
    noise: PreparedLog,
) -> None:
    config = TrainingConfig(epochs=20, batch_size=50, precision="fp32")
    events: list[Event] = []
    kept: list[object] = []
    job = job_on(noise, MODEL, config, 0, "fp32")
    train(job, noise, events.append, keep=kept.append, progress_seconds=1e9, ends_at=time.time())
    (point,) = (event.point for event in events if isinstance(event, EvaluationEvent))
    trained = events[-1]
    assert isinstance(trained, TrainingEvent)
    assert point.examples == trained.measured.cut_after == 50
    assert (trained.best, len(kept)) == (point.validation, 1)
