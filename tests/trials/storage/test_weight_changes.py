"""What weights became: base and changes together are the live weights to the bit, under admission and eviction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dhen.batch import FeatureBatch, Keys
from dhen.errors import UserError
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Growing, Table
from trials.data.loader import LabelledBatch
from trials.records.job import TrainingConfig
from trials.store.weights import GONE, KEYS, ROWS, VALUES, apply_changes, changes
from trials.training.step import TrainStep

MODEL = parse_model({"embedding_dim": 4, "layers": [{"modules": ["mlp"]}], "dropout": 0.0}, "test")
RULES = (Growing(capacity=5, admit_after=1), Growing(capacity=3, admit_after=2, evict="lru", ttl=4))
SCHEMA = FeatureSchema(
    tables=(
        Table(name="user", rows=6, growing=RULES[0]),
        Table(name="item", rows=4, growing=RULES[1]),
        Table(name="site", rows=8),
    ),
    numeric=("x",),
)
TABLE = "features.tables.weight"


def a_batch(rows: list[tuple[int, int, int]]) -> LabelledBatch:
    """Keys of a user and an item and the id of a site, an example each."""
    values = torch.tensor(rows)
    ids = torch.zeros(len(rows), 3, dtype=torch.int32)
    ids[:, 2] = values[:, 2]
    inputs = FeatureBatch(
        ids_BT=ids, bags=(), numeric_BK=torch.ones(len(rows), 1), keys=Keys(values[:, :2].contiguous(), ())
    )
    return LabelledBatch(features=inputs, label_B=(values[:, 0] % 2).float(), weight_B=None)


ROWS_OF_A_STEP = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 7)), min_size=1, max_size=6
)
HISTORIES = st.lists(st.lists(ROWS_OF_A_STEP, max_size=4), min_size=1, max_size=5)


@settings(max_examples=20)
@given(HISTORIES, st.sampled_from([{}, {"table_decay": 0.01}, {"table_precision": "fp16"}]))
def test_base_and_changes_are_the_live_weights(
    history: list[list[list[tuple[int, int, int]]]], more: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    step = TrainStep(
        build_model(MODEL, SCHEMA).train(), TrainingConfig(batch_size=4, precision="fp32", epochs=1, **more)
    )
    reader = build_model(MODEL, SCHEMA)
    reader.load_state_dict(step.weights())
    for steps in history:
        before = {name: tensor.clone() for name, tensor in reader.state_dict().items()}
        for rows in steps:
            step(a_batch(rows))
        step.settle()
        live = step.weights()
        found = changes(before, live)
        apply_changes(reader.state_dict(), found)
        for name, tensor in reader.state_dict().items():
            assert torch.equal(tensor, live[name]), name
        had, has = (set(keys[KEYS].tolist()) - {0} for keys in (before, live))
        assert set(found.get(f"{KEYS}{GONE}", torch.empty(0)).tolist()) == had - has
        if not steps:
            assert not found


def test_only_rows_that_changed_are_there() -> None:
    old = {TABLE: torch.zeros(1000, 8), "head": torch.zeros(3), "step": torch.tensor(1.0)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new[TABLE][[7, 900]] = 1.0
    new["head"] += 1.0
    found = changes(old, new)
    assert set(found) == {f"{TABLE}{ROWS}", f"{TABLE}{VALUES}", "head"}
    assert found[f"{TABLE}{ROWS}"].tolist() == [7, 900]
    new["step"] += 1
    assert set(changes(old, new)) == {*found, "step"}


def test_a_bit_is_a_change() -> None:
    old = {"a": torch.tensor([0.0, float("nan"), 1.0])}
    assert not changes(old, {"a": old["a"].clone()})
    assert changes(old, {"a": torch.tensor([-0.0, float("nan"), 1.0])})


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"b": torch.zeros(1)}, "changes b"),
        ({"a": torch.zeros(4)}, "changes a"),
        ({f"a{ROWS}": torch.tensor([3]), f"a{VALUES}": torch.zeros(1)}, "rows of a"),
        ({f"a{ROWS}": torch.tensor([1])}, "rows of a"),
        ({"a": torch.zeros(3), f"{KEYS}{GONE}": torch.tensor([9])}, "ids that have none"),
    ],
)
def test_changes_of_something_else_change_nothing(found: dict[str, torch.Tensor], says: str) -> None:
    weights = {"a": torch.ones(3), KEYS: torch.tensor([0, 5])}
    with pytest.raises(UserError, match=says):
        apply_changes(weights, found)
    assert weights["a"].tolist() == [1.0, 1.0, 1.0]
