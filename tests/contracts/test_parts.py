"""Parts: a model is made of them without a rest, and every kind that networks are made of is measured."""

from __future__ import annotations

import random

import pytest

from dhen.memory.parts import DECLARED
from dhen.schema import FeatureSchema, Table
from spaces.catalog_loader import catalog, load_space
from trials.planner.segments import segments
from trials.profiling.subjects import SHAPES, subjects

SCHEMA = FeatureSchema(
    tables=(
        Table(name="site", rows=1000),
        Table(name="age_bucket", rows=50, buckets=True),
        Table(name="words", rows=5000, multi_hot=True, mean_ids=2.5),
    ),
    numeric=("age", "price"),
)
BESIDE_SUBJECTS = {"features", "tables", "gradient sum"}
"""Kinds that other cases measure (`trials/profiling/cases.py`), or that follow from those of others."""
UNMEASURED = {"members"}
"""Kinds that stand for the rest: heads of several members in one network."""


@pytest.mark.parametrize("space", sorted(catalog()))
def test_parts_have_all_operations_and_all_traffic_of_their_segment(space: str) -> None:
    rng, loaded = random.Random(0), load_space(space)
    for _ in range(5):
        model = loaded.decode(loaded.random_point(rng)).model
        for segment in segments(model, SCHEMA, "bf16", "cpu", 512):
            assert segment.operations == sum(part.operations for part in segment.parts)
            moved = sum(part.sizes(512)[1] for part in segment.parts)
            assert moved == segment.footprint.traffic
            assert all(len(part.per_example) == DECLARED for part in segment.parts)


@pytest.mark.parametrize("space", sorted(catalog()))
def test_every_kind_of_part_in_a_space_is_measured(space: str) -> None:
    measured = {subject.part.kind for subject in subjects(2)} | BESIDE_SUBJECTS | UNMEASURED
    rng, loaded = random.Random(1), load_space(space)
    for _ in range(20):
        model = loaded.decode(loaded.random_point(rng)).model
        for segment in segments(model, SCHEMA, "bf16", "cpu", 512):
            assert {part.kind for part in segment.parts} <= measured


def test_a_kind_is_measured_at_more_sizes_than_one() -> None:
    kinds = [subject.part.kind for subject in subjects(2)]
    assert min(kinds.count(kind) for kind in kinds) >= len(SHAPES)


def test_flops_of_parts_are_those_of_the_segment() -> None:
    """But for convolutions, whose kernels do more than is counted."""
    rng, loaded = random.Random(2), load_space("default")
    for _ in range(20):
        model = loaded.decode(loaded.random_point(rng)).model
        for segment in segments(model, SCHEMA, "fp32", "cpu", 64):
            flops = sum(part.sizes(64)[2] for part in segment.parts)
            if any(part.kind == "block conv" for part in segment.parts):
                assert flops > 64 * segment.flops
            else:
                assert flops == pytest.approx(64 * segment.flops)
