"""Training on the rows of training and validation together, as long as an earlier training took to its best."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupted import Interrupted, Told, run

from dhen.model import parse_model
from search.execution.trainer import job_on, new_record, refit_job
from trials.data.log_views import JoinedArray, LogWithValidation
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.job import Job, TrainingConfig
from trials.records.trial_record import Curve, CurvePoint, Metrics, Refit, TrialKind

MODEL = parse_model({"embedding_dim": 8, "layers": [{"modules": ["mlp"]}]}, "test")
SETTINGS = {"epochs": 2, "batch_size": 100, "precision": "fp32", "patience": 100}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedLog:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    with (tmp_path / "log.csv").open("w") as file:
        file.write("click,price,city,tags\n")
        for _ in range(600):
            price, city = draw.random(), draw.randint(0, 199)
            tags = "|".join(f"t{draw.randint(0, 20)}" for _ in range(draw.randint(0, 3)))
            file.write(f"{int(draw.random() < 0.2 + 0.6 * (city < 100))},{price:.3f},{city},{tags}\n")
    return prepare([tmp_path / "log.csv"], out=tmp_path / "prepared")


def job_of(log: PreparedLog, refit: Refit | None = None, **settings: object) -> Job:
    config = TrainingConfig.model_validate(SETTINGS | settings)
    return job_on(log, MODEL, config, 0, "fp32").replace(refit=refit)


def point(ne: float) -> CurvePoint:
    metrics = Metrics(ne=ne, log_loss=ne, auc=0.5, calibration=1.0, examples=10)
    return CurvePoint(examples=1, epoch=1, train_loss=1, learning_rate=1, seconds=1, validation=metrics)


def test_the_rows_are_those_of_both_splits(log: PreparedLog) -> None:
    both = LogWithValidation(log)
    joined, parts = both.split("train"), [log.split(name) for name in ("train", "validation")]
    assert both.manifest.rows["train"] == joined.rows == sum(part.rows for part in parts)
    assert np.array_equal(joined.labels, np.concatenate([part.labels for part in parts]))
    for name in ("categorical", "numeric"):
        whole = np.concatenate([getattr(part.inputs, name) for part in parts])
        assert np.array_equal(getattr(joined.inputs, name), whole)
    assert joined.base_rate == pytest.approx(float(np.mean(np.asarray(joined.labels))))
    rows = np.random.default_rng(0).permutation(joined.rows)
    first = parts[0].rows
    assert joined.inputs.bags
    for number, bags in enumerate(joined.inputs.bags):
        taken = bags.take(rows)
        for place, row in enumerate(rows):
            part, own = (parts[0], row) if row < first else (parts[1], row - first)
            expected = part.inputs.bags[number].take(np.array([own])).ids
            assert np.array_equal(taken.ids[taken.offsets[place] : taken.offsets[place + 1]], expected)
    for name in ("validation", "test"):
        assert np.array_equal(both.split(name).labels, log.split(name).labels)


def test_joined_arrays_are_read_as_one() -> None:
    draw = np.random.default_rng(0)
    parts = draw.integers(0, 9, (7, 3)), draw.integers(0, 9, (5, 3))
    joined, whole = JoinedArray(*parts), np.concatenate(parts)
    for first, last in itertools.product((None, 0, 2, 7, 9, -3), (None, 0, 5, 7, 11)):
        rows = slice(first, last)
        assert np.array_equal(joined[rows], whole[rows])
        assert np.array_equal(joined[rows, 1], whole[rows, 1])
    order = draw.permutation(12)
    assert np.array_equal(joined[order], whole[order])
    assert np.array_equal(np.take(joined, order, axis=0), whole[order])


def test_no_row_is_written_twice(log: PreparedLog, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*.npy"))
    run(job_of(both := LogWithValidation(log), frequency_decay=0.1), both, Told(), None)
    assert set(tmp_path.rglob("*.npy")) <= before


def test_what_it_does_again_is_read_from_a_curve() -> None:
    curve = [point(0.9), point(0.95), point(0.8), point(0.8), point(0.85)]
    assert Refit.of(Curve(curve)) == Refit(evaluations=3, lowered_after=(2,))


def test_all_evaluations_are_the_training_on_both(log: PreparedLog) -> None:
    """Nothing but validation's rows tells a refit from a training: the last weights are those of one that had the
    rows of both from the start."""
    both = LogWithValidation(log)
    seen = run(job_of(both), both, told := Told(), None)
    assert told.points[-1]["validation"]["ne"] == min(one["validation"]["ne"] for one in told.points)
    refit = Refit(evaluations=len(seen.points))
    again = run(job_of(both, refit), both, Told(), None)
    assert equal(again, seen)
    assert len(again.points) == 1
    # it ends where the earlier training had its best
    ended = run(job_of(both, Refit(evaluations=2)), both, Told(), None)
    assert ended.points[0]["examples"] == seen.points[1]["examples"]
    assert not equal(ended, seen)


def test_rates_are_lowered_where_they_were(log: PreparedLog) -> None:
    both = LogWithValidation(log)
    as_they_are, lowered = (
        run(job_of(both, Refit(evaluations=3, lowered_after=numbers), plateau_factor=0.1), both, Told(), None)
        for numbers in ((), (1,))
    )
    rates = [told.points[0]["learning_rate"] for told in (as_they_are, lowered)]
    assert rates[1] == pytest.approx(0.1 * rates[0])


def test_the_mean_of_the_last_weights_is_kept(log: PreparedLog) -> None:
    both = LogWithValidation(log)
    second, third = (run(job_of(both, Refit(evaluations=number)), both, Told(), None) for number in (2, 3))
    mean = run(job_of(both, Refit(evaluations=3), weight_average=2), both, Told(), None)
    for name, weights in mean.weights.items():
        expected = (second.weights[name] + third.weights[name]) / 2
        assert torch.allclose(weights, expected, rtol=1e-6, atol=1e-7)


def test_it_goes_on_from_a_checkpoint_to_the_bit(log: PreparedLog, tmp_path: Path) -> None:
    both = LogWithValidation(log)
    job = job_of(both, Refit(evaluations=4, lowered_after=(1, 2)), weight_average=3)
    whole = run(job, both, Told(), None)
    for at in (1, 3):
        folder = tmp_path / str(at)
        with pytest.raises(Interrupted):
            run(job, both, Told(at * (job.training.evaluate_every or 0)), folder)
        assert equal(run(job, both, Told(), folder), whole)


def test_its_evaluations_lie_at_the_same_shares_of_the_passes(log: PreparedLog) -> None:
    record = new_record(0, TrialKind.CANDIDATE, {}, job_of(log))
    record = record.with_result(curve=[point(0.9 - 0.01 * number) for number in range(6)])
    job, rows = refit_job(record, log, seed_shift=2), log.manifest.rows
    assert job.refit.evaluations == 6
    assert (job.training, job.seed) == (job_of(log).training, 2)
    share = job.evaluate_every / (rows["train"] + rows["validation"])
    assert share == pytest.approx(job_of(log).evaluate_every / rows["train"], rel=1e-2)
    assert job.evaluate_every != job_of(log).evaluate_every
    assert job.fingerprint not in (job_of(log).fingerprint, job.replace(refit=None).fingerprint)


@pytest.mark.parametrize(
    ("technique", "weights_bytes", "settings", "expected"),
    [
        ("dp", 1000, {}, 3),
        ("dp", 1000, {"weight_average": 2}, 2),
        ("dp", 1024**3, {}, 2),
        ("dp", 2 * 1024**3, {}, 0),
        ("dp+ssd_tables", 1000, {}, 0),
    ],
)
def test_its_mean_is_of_half_of_its_evaluations_where_copies_have_room(
    technique: str, weights_bytes: int, settings: dict[str, int], expected: int, log: PreparedLog
) -> None:
    record = new_record(0, TrialKind.CANDIDATE, {}, job_of(log, **settings)).with_plan(technique=technique)
    record = record.with_result(curve=[point(0.9 - 0.01 * number) for number in range(6)])
    record = record.replace(job=record.job.replace(weights_bytes=weights_bytes))
    assert refit_job(record, log).weight_average == expected


def equal(told: Told, other: Told) -> bool:
    assert told.weights.keys() == other.weights.keys()
    return all(torch.equal(weights, other.weights[name]) for name, weights in told.weights.items())
