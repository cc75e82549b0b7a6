"""The last stage: the best architectures keep what they are, and only the rest is proposed anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
from records import bare

from dhen.errors import UserError
from dhen.schema import FeatureSchema, Table
from dhen.values import parse
from search.samplers import SAMPLERS
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer
from search.study.tuning import best_architectures, check_tunable
from spaces.space import Point, Space, SpaceConfig, load_space
from trials.records.trial_record import TrialRecord

FEATURES = FeatureSchema(tables=(Table(name="c0", rows=100),), numeric=("n0",))
DATA: dict[str, Any] = {
    "depth": [1, 2],
    "slots": 2,
    "modules": {"mlp": {"mlp": [[8], [16]], "dropout": [None, 0.0, 0.2]}, "dcn_v2": {}, "linear": {}},
    "model": {"embedding_dim": [4, 8], "dropout": [0.0, 0.1]},
    "training": {
        "learning_rate": {"low": 0.001, "high": 0.01, "log": True},
        "schedule": ["linear", "cosine"],
    },
}
SPACE = Space("test", parse(SpaceConfig, DATA, "test"))
TUNED = {"training.learning_rate", "training.schedule", "dropout"}
OF_MLP = "layer.mlp.dropout"


def completed(number: int, point: Point, ne: float, **more: Any) -> TrialRecord:
    model = SPACE.decode(point).model.to_dict()
    return bare(number, ne=ne, point=point, model=model, **({"flops": 1.0} | more))


def a_point(**changes: Any) -> Point:
    fixed = {"depth": 1, "layer.block0": "linear", "layer.block1": "none", "layer.ensemble": "sum"}
    return SPACE.random_point(random.Random(0)) | fixed | changes


def test_the_best_the_knee_and_the_next_each_once() -> None:
    mlp = a_point(**{"layer.block0": "mlp"})
    records = [
        completed(0, a_point(), 0.80, flops=1e4),
        completed(1, a_point(**{"layer.block1": "dcn_v2"}), 0.72, flops=2e4),  # the knee
        completed(2, mlp, 0.71, flops=9e5),
        completed(3, mlp | {OF_MLP: 0.2, "dropout": 0.0, "training.schedule": "cosine"}, 0.70, flops=9e5),
        completed(4, a_point(depth=2), 0.1, flops=1e3, tuned_from=0),
        completed(5, a_point(**{"layer.block0": "dcn_v2"}), 0.9, flops=5e5),
    ]
    found = best_architectures(records, SPACE, 9)
    assert [each.trial for each in found] == [3, 1, 0, 5]
    assert [each.trial for each in best_architectures(records, SPACE, 2)] == [3, 1]
    names = {axis.name for axis in SPACE.axes}
    assert names - found[0].fixed.keys() == TUNED | {OF_MLP}
    assert names - found[1].fixed.keys() == TUNED  # it has no MLP
    assert found[1].fixed.items() <= records[1].point.items()


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_samplers_propose_what_is_not_fixed(sampler: str) -> None:
    """Low learning rates and dropout are good: those that learn propose them for an architecture never seen."""
    proposals = Proposals(
        sampler=sampler, seed=1, pricer=CandidatePricer(SPACE, FEATURES, lambda candidate: True)
    )
    known: list[TrialRecord] = []
    for number in range(16):
        point = SPACE.random_point(random.Random(number))
        rate = float(point["training.learning_rate"] or 0)
        ne = 0.7 + rate + 0.01 * (point["training.schedule"] == "linear")
        known.append(completed(number, point, ne, flops=1e4))
    proposals.remember(known)
    fixed = {name: value for name, value in a_point().items() if name not in TUNED}
    asked = [proposals.ask(number, {}, fixed)[0] for number in range(16, 19)]
    assert all(fixed.items() <= point.items() for point in asked)
    assert len({str(point) for point in asked}) == len(asked)
    if sampler in ("tpe", "gp", "ranker"):
        assert sorted(float(point["training.learning_rate"] or 1) for point in asked)[1] < 0.004


LATE = Space(
    "late",
    parse(
        SpaceConfig,
        DATA | {"tuning": ["training.schedule", "mlp.dropout", "mlp.mlp", "embedding_dim"]},
        "late",
    ),
)
"""Leaves more for the last stage than it would tune of itself."""


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_what_is_left_for_the_last_stage_keeps_its_first_value_until_then(sampler: str) -> None:
    left = {"training.schedule": "linear", OF_MLP: None, "layer.mlp.mlp": "8", "embedding_dim": 4}
    assert LATE.left_for_tuning == left
    proposals = Proposals(
        sampler=sampler, seed=1, pricer=CandidatePricer(LATE, FEATURES, lambda candidate: True)
    )
    for number in range(14):
        point, _ = proposals.ask(number, {}, LATE.left_for_tuning)
        assert left.items() <= point.items()
        proposals.tell(completed(number, point, 0.7 + float(point["training.learning_rate"] or 0), flops=1e4))
    assert proposals.ask(14, {"embedding_dim": 8}, LATE.left_for_tuning)[0]["embedding_dim"] == 8


def test_the_last_stage_tunes_what_was_left_for_it_of_modules_that_are_there() -> None:
    (with_mlp,) = best_architectures(
        [completed(0, a_point(**{"layer.block1": "mlp"}), 0.8, flops=1e4)], LATE, 1
    )
    assert {axis.name for axis in LATE.axes} - with_mlp.fixed.keys() == TUNED | LATE.left_for_tuning.keys()
    (without,) = best_architectures([completed(0, a_point(), 0.8, flops=1e4)], LATE, 1)
    assert {axis.name for axis in LATE.axes} - without.fixed.keys() == TUNED | {"embedding_dim"}


def test_what_is_left_must_be_there() -> None:
    with pytest.raises(UserError, match=r"setting under `tuning` 'mlp.droput'.*Did you mean 'mlp.dropout'"):
        Space("t", parse(SpaceConfig, DATA | {"tuning": ["mlp.droput"]}, "t"))


def test_a_space_with_nothing_to_tune() -> None:
    check_tunable(SPACE)
    check_tunable(Space("t", parse(SpaceConfig, {"modules": {"mlp": {"dropout": [0.0, 0.1]}}}, "t")))
    constant = {"modules": {"mlp": {}}, "model": {"dropout": 0.1}, "training": {"schedule": "linear"}}
    for space in (load_space("paper_table1"), Space("t", parse(SpaceConfig, constant, "t"))):
        with pytest.raises(UserError, match="leaves none of them open"):
            check_tunable(space)
