"""Which axes are ordered, what candidates have on them, and which ends a wider space could go beyond."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dhen.values import parse
from search.execution.growth import ordered_axes
from search.execution.trainer import candidate_training
from spaces.space import Point, Space, SpaceConfig, catalog, load_space
from trials.records.findings import OrderedAxis
from trials.records.job import TrainingConfig
from trials.records.trial_record import JobSummary, Origin, TrialKind, TrialRecord

NAMES = sorted(catalog())


def made(space: Space, point: Point) -> TrialRecord:
    """The trial of a point, tuned, so that what waits for the tuning stage counts."""
    candidate = space.decode(point)
    training = candidate_training(TrainingConfig(), candidate)
    job = JobSummary(model=candidate.model.to_dict(), training=training.to_dict())
    origin = Origin(tuned_from=1)
    return TrialRecord(number=2, kind=TrialKind.CANDIDATE, point=point, job=job, origin=origin)


def by_name(**config: object) -> dict[str, OrderedAxis]:
    space = Space("mine", parse(SpaceConfig, {"modules": {"mlp": {}}} | config, "mine"))
    return {axis.name: axis for axis in ordered_axes(space)}


@given(st.sampled_from(NAMES), st.integers(0, 10_000))
def test_a_jobs_values_are_those_of_its_point(name: str, seed: int) -> None:
    """Read from the job, as a trial in brief has no point."""
    space = load_space(name)
    point = space.random_point(random.Random(seed))
    trial = made(space, point)
    depth = len(trial.job.model["layers"])
    for axis in ordered_axes(space):
        value = axis.value(trial)
        if axis.kind is None and (axis.layer or 0) < depth:
            assert value == point[axis.name]
        if axis.layer is not None and axis.layer >= depth:
            assert value is None
        if value is not None:
            assert value == point[axis.name]
            position = axis.position(value)
            assert position is not None
            assert 0 <= position <= 1


def test_ranges_numbers_and_widths_are_ordered() -> None:
    axes = by_name(
        depth=[3, 1, 2],
        modules={"mlp": {"mlp": [[256, 128], [64], [128, 64]]}, "dlrm": {"mlp": [[64, 128], [128, 64]]}},
        model={"embedding_dim": [32, 8], "buckets": ["summed", "apart"], "dropout": [0.1]},
        training={"learning_rate": {"low": 0.01, "high": 0.1, "log": True}, "schedule": ["auto", "cosine"]},
    )
    assert {name: axis.ends for name, axis in axes.items()} == {
        "depth": (1, 3),
        "layer.out_embeddings": (4, 8),
        "layer.mlp.mlp": ("64", "256-128"),
        "embedding_dim": (8, 32),
        "training.learning_rate": (0.01, 0.1),
    }


def test_an_end_that_nothing_lies_beyond_is_closed() -> None:
    axes = by_name(
        depth=[1, 2],
        modules={"dcn_v2": {"layers": [1, 2]}, "dlrm": {"rank": [0, 8], "mlp": [[8], [16]]}},
        model={"table_dim_exponent": [0.0, 1.0], "head": [[], [64]], "embedding_dim": [8, 16]},
        training={"weight_decay": [0.0, 0.1], "warmup_share": [0.1, 1.0], "learning_rate": [0.1, 0.2]},
    )
    ends = {name: (axis.open_below, axis.open_above) for name, axis in axes.items()}
    assert ends == {
        "depth": (False, True),
        "layer.out_embeddings": (True, True),
        "layer.dcn_v2.layers": (False, True),
        "layer.dlrm.rank": (False, True),
        "layer.dlrm.mlp": (True, True),
        "table_dim_exponent": (False, False),
        "head": (False, True),
        "embedding_dim": (True, True),
        "training.weight_decay": (False, True),
        "training.warmup_share": (True, False),
        "training.learning_rate": (True, True),
    }


def test_what_waits_for_the_tuning_stage_is_marked() -> None:
    marked = {axis.name for axis in ordered_axes(load_space("default")) if axis.tuned_last}
    assert marked == {"table_dim_exponent", "training.table_decay", "training.frequency_decay"}
