"""Growing tables: which ids have rows, which give way, and that a row begins anew with its id."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dhen.batch import FeatureBatch, Keys
from dhen.inputs.growing import EMBEDDING_INIT_STD, GrowingRows
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Growing, Table
from trials.data.loader import LabelledBatch
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks
from trials.training.embeddings.growing import GrowingTables, NewRows
from trials.training.step import TrainStep, WeightAverage

MODEL = parse_model({"embedding_dim": 4, "layers": [{"modules": ["mlp"]}], "dropout": 0.0}, "test")


def schema(*rules: Growing, bags: int = 0) -> FeatureSchema:
    tables = [
        Table(name=f"t{i}", rows=rule.capacity + 1, growing=rule, multi_hot=i >= len(rules) - bags)
        for i, rule in enumerate(rules)
    ]
    return FeatureSchema(tables=tuple(tables), numeric=("x",))


def features(columns: Sequence[Sequence[int]], bags: Sequence[Sequence[int]] = ()) -> FeatureBatch:
    """One row for each example; every bag has all its keys in the first one."""
    keys_BG = torch.tensor([list(row) for row in columns], dtype=torch.int64)
    offsets = torch.tensor([0] + [len(bag) for bag in bags][:1] * (len(columns) - 1))
    return FeatureBatch(
        ids_BT=torch.zeros(keys_BG.shape, dtype=torch.int32),
        bags=tuple((torch.zeros(len(bag), dtype=torch.int32), offsets) for bag in bags),
        numeric_BK=torch.zeros(len(columns), 1),
        keys=Keys(keys_BG, tuple(torch.tensor(bag, dtype=torch.int64) for bag in bags)),
    )


class Watched:
    """Growing tables, batch by batch."""

    def __init__(self, *rules: Growing, bags: int = 0) -> None:
        self.rows = GrowingRows(schema(*rules, bags=bags))
        self.tables = GrowingTables(self.rows, Ranks())
        self.begun: NewRows | None = None

    def admit(self, *keys: int, time: int | None = None) -> list[int]:
        """The rows of keys of the only table, an example each."""
        batch, self.begun = self.tables.admit(features([[key] for key in keys]), time)
        assert batch.keys is None
        return list(batch.ids_BT[:, 0].tolist())

    def found(self, *keys: int) -> list[int]:
        """The rows that the keys have, for whoever only reads."""
        return list(self.rows(features([[key] for key in keys])).ids_BT[:, 0].tolist())


def test_a_key_has_a_row_once_it_occurred_often_enough() -> None:
    tables = Watched(Growing(capacity=10, admit_after=3))
    assert tables.admit(5, 5, 6) == [0, 0, 0]
    assert tables.admit(6, 5) == [0, 1]
    assert tables.begun.rows.tolist() == [1]
    assert tables.admit(6, 5) == [2, 1]
    assert tables.admit(7, 7, 7, 5) == [3, 3, 3, 1]
    assert tables.found(5, 6, 7, 8) == [1, 2, 3, 0]


def test_occurrences_count_within_a_pass_and_a_missing_value_has_the_default_row_however_often() -> None:
    tables = Watched(Growing(capacity=10, admit_after=2))
    tables.admit(5)
    tables.tables.begin_pass()
    assert tables.admit(5, 0, 0, 0) == [0] * 4
    assert tables.admit(5) == [1]
    assert len(tables.begun.rows) == 1


def test_equal_values_of_two_tables_and_a_bag_have_rows_of_their_own() -> None:
    rule = Growing(capacity=3, admit_after=1)
    tables = Watched(rule, Growing(capacity=5, admit_after=1), rule, bags=1)
    batch, begun = tables.tables.admit(features([[8, 8], [9, 8]], [[8, 9, 8]]))
    assert batch.ids_BT[:, 1].tolist() == [1, 1]
    assert sorted(batch.ids_BT[:, 0].tolist()) == [1, 2]
    ((ids, _),) = batch.bags
    assert ids[0] == ids[2] != ids[1]
    assert {name: len(begun.rows[its]) for name, its in begun.tables.items()} == {"t0": 2, "t1": 1, "t2": 2}


def test_lfu_gives_the_row_of_the_rarest_to_who_surely_occurs_more_often() -> None:
    tables = Watched(Growing(capacity=3, admit_after=1, evict="lfu"))
    tables.admit(1, 1, 1, 1, 1, 1)
    tables.admit(*[2] * 5)
    tables.admit(3, 3, 4)
    assert tables.found(1, 2, 3, 4) == [1, 2, 3, 0]
    tables.admit(*[4] * 12)  # 13 to 2 are less than three deviations apart: 3 * sqrt(15) is 11.6
    assert tables.found(1, 2, 3, 4) == [1, 2, 3, 0]
    tables.admit(4, 4)
    assert tables.found(1, 2, 3, 4) == [1, 2, 0, 3]
    tables = Watched(Growing(capacity=2, admit_after=1, evict="lfu"))
    tables.admit(1)
    tables.admit(2)
    tables.admit(*[3] * 20)
    assert tables.found(1, 2, 3) == [0, 2, 1], "of equally rare ones, who was not seen for longest"


@pytest.mark.parametrize("equally", [True, False])
def test_ids_that_are_as_frequent_as_others_keep_their_rows(equally: bool) -> None:
    """Forty ids for twenty rows: where all occur alike, those that came first stay; else frequent ones come."""
    tables, drawn = (
        Watched(Growing(capacity=20, admit_after=2, evict="lfu")),
        torch.Generator().manual_seed(0),
    )
    odds = torch.ones(40) if equally else torch.cat([torch.ones(20), torch.full((20,), 12.0)])
    tables.admit(*range(1, 21), *range(1, 21))
    changed = 0
    for _ in range(60):
        tables.admit(*(1 + odds.multinomial(20, replacement=True, generator=drawn)).tolist())
        changed += 0 if tables.begun is None else len(tables.begun.rows)
    first, later = (sum(row > 0 for row in tables.found(*its)) for its in (range(1, 21), range(21, 41)))
    assert (changed <= 2) if equally else (later >= 17)
    assert first + later == 20


def test_lru_takes_the_rows_of_those_not_seen_for_longest() -> None:
    tables = Watched(Growing(capacity=3, admit_after=1, evict="lru"))
    tables.admit(1, 1, 1, 1)
    tables.admit(2)
    tables.admit(3)
    tables.admit(1)
    tables.admit(4)
    assert [row > 0 for row in tables.found(1, 2, 3, 4)] == [True, False, True, True]


def test_ttl_takes_back_the_rows_of_those_not_seen_for_so_many_steps() -> None:
    tables = Watched(Growing(capacity=8, admit_after=1, ttl=3))
    tables.admit(1, 2)
    for _ in range(2):
        tables.admit(2)
        assert tables.found(1) != [0]
    tables.admit(2)
    assert tables.found(1, 2) == [0, 2]
    assert tables.admit(1) == [1]


HOUR = 3_600_000


def test_ttl_takes_back_the_rows_of_those_not_seen_for_so_long_by_time_stamps() -> None:
    tables = Watched(Growing(capacity=8, admit_after=1, ttl="2h"))
    tables.admit(1, 2, time=None)  # before the first stamp
    tables.admit(3, 3, time=10 * HOUR)
    tables.admit(2, time=11 * HOUR)
    tables.admit(2, time=None)
    assert tables.found(1, 2, 3) == [1, 2, 3]
    tables.admit(2, time=12 * HOUR - 1)
    assert tables.found(1, 2, 3) == [1, 2, 3]
    tables.admit(3, time=9 * HOUR)  # which comes late, and is seen now
    tables.admit(2, time=12 * HOUR + HOUR // 8)
    assert tables.found(1, 2, 3) == [0, 2, 3]
    assert tables.admit(1, time=12 * HOUR + HOUR // 8) == [1]
    tables.admit(9, time=20 * HOUR)
    assert tables.found(1, 2, 3, 9) == [0, 0, 0, 1]


def test_time_begins_anew_with_each_pass() -> None:
    tables = Watched(Growing(capacity=8, admit_after=1, ttl="2h"))
    tables.admit(1, 2, time=10 * HOUR)
    tables.admit(1, time=11 * HOUR)
    tables.tables.begin_pass()
    tables.admit(3, time=5 * HOUR)
    assert tables.found(1, 2, 3) == [1, 2, 3]
    tables.admit(1, time=6 * HOUR)
    tables.admit(3, time=7 * HOUR)
    assert tables.found(1, 2, 3) == [1, 0, 3]


def test_a_batch_larger_than_the_table_goes_on_with_its_most_frequent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = Watched(Growing(capacity=2, admit_after=1, evict="lru"))
    with caplog.at_level(logging.WARNING):
        rows = tables.admit(1, 2, 2, 3, 3, 4)
    assert [row > 0 for row in rows] == [False, True, True, True, True, False]
    (record,) = caplog.records
    assert "capacity 2 is less than the ids of one batch" in record.getMessage()
    tables.admit(5, 6, 7)
    assert len(caplog.records) == 1
    assert sum(row > 0 for row in tables.found(5, 6, 7)) == 2


RULES = st.builds(
    Growing,
    capacity=st.integers(1, 12),
    admit_after=st.integers(1, 3),
    evict=st.sampled_from(["lfu", "lru"]),
    ttl=st.none() | st.integers(1, 6) | st.sampled_from(["1h", "3h"]),
)
HISTORY = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), min_size=1, max_size=12)


@given(RULES, HISTORY)
def test_no_two_keys_have_one_row_and_rows_begin_when_they_change_hands(
    rule: Growing, history: list[list[int]]
) -> None:
    tables, owners = Watched(rule), dict[int, int]()
    for keys in history:
        rows = tables.admit(*keys)
        begun = set() if tables.begun is None else set(tables.begun.rows.tolist())
        of_key = {row: key for key, row in zip(keys, rows, strict=True) if row}
        assert max(rows) <= rule.capacity
        assert [of_key.get(row, 0) for row in rows] == [
            key if row else 0 for key, row in zip(keys, rows, strict=True)
        ]
        # a row that goes to another key begins anew; one that stays with its key does not
        assert begun <= of_key.keys()
        assert all((owners.get(row) != key) <= (row in begun) for row, key in of_key.items())
        owners |= of_key
        assert tables.found(*keys) == rows


def batch(*keys: int) -> LabelledBatch:
    drawn = torch.Generator().manual_seed(len(keys))
    return LabelledBatch(
        features=features([[key] for key in keys]),
        label_B=torch.randint(0, 2, (len(keys),), generator=drawn).float(),
        weight_B=None,
    )


def trainer(rule: Growing, **training: object) -> TrainStep:
    torch.manual_seed(3)
    config = TrainingConfig.model_validate({"embedding_learning_rate": 0.5} | training).resolved(1000, "fp32")
    return TrainStep(build_model(MODEL, schema(rule)).train(), config)


@pytest.mark.parametrize("more", [{}, {"table_decay": 0.1}, {"table_precision": "fp16"}], ids=str)
def test_a_row_that_goes_to_another_id_forgets_weights_and_optimizer_state(more: dict[str, object]) -> None:
    rule = Growing(capacity=1, admit_after=1, evict="lru")
    worn, fresh = trainer(rule, **more), trainer(rule, **more)
    for _ in range(5):
        worn(batch(7, 7, 7))
    sum_of_7 = worn.table_state()["sum.t0.0-4"][1].item()
    for step in (worn, fresh):
        step.scale_learning_rates(dense=0.0, tables=0.0)  # so that what a row begins with is seen
        step(batch(8, 8, 8))
    first, second = (step.table_state()["weight.t0.0-4"][1].float() for step in (worn, fresh))
    assert torch.equal(first, second)
    assert 0 < first.abs().max() < 5 * EMBEDDING_INIT_STD
    assert 0 < worn.table_state()["sum.t0.0-4"][1] < sum_of_7


def test_fresh_weights_are_normal_and_follow_from_key_and_seed_alone() -> None:
    tables = [trainer(Growing(capacity=2000, admit_after=1)) for _ in range(2)]
    keys = list(range(1, 1501))
    for step, order in zip(tables, (keys, keys[::-1]), strict=True):
        step.scale_learning_rates(dense=0.0, tables=0.0)
        step(batch(*order))
        step(batch(*keys))
    weights = [step.table_state()["weight.t0.0-4"][1:1501] for step in tables]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert weights[0].mean().abs() < 0.003
    assert weights[0].std() == pytest.approx(EMBEDDING_INIT_STD, rel=0.05)
    assert len(weights[0].unique()) > 5990


def test_unknown_ids_are_scored_with_the_default_row_which_is_learnt() -> None:
    step = trainer(Growing(capacity=10, admit_after=2))
    before = step.table_state()["weight.t0.0-4"][0].clone()
    for key in range(1, 20):
        step(batch(key))
    assert not torch.equal(step.table_state()["weight.t0.0-4"][0], before)
    step.model.eval()
    unseen, missing, rare = (step.model(batch(key).features) for key in (99, 0, 4))
    assert unseen.item() == missing.item() == rare.item()


def test_weights_bring_the_keys_along() -> None:
    step = trainer(Growing(capacity=10, admit_after=1))
    for _ in range(5):
        step(batch(3, 4, 5))
    other = build_model(MODEL, schema(Growing(capacity=10, admit_after=1))).eval()
    other.load_state_dict(step.weights())
    step.model.eval()
    scored = batch(5, 3, 9, 4).features
    torch.testing.assert_close(other(scored), step.model(scored), rtol=0, atol=0)
    assert other(scored)[0] != other(scored)[2]


def test_a_mean_of_weights_has_of_each_row_what_it_was_since_it_has_its_id() -> None:
    step = trainer(Growing(capacity=2, admit_after=1, evict="lru"))
    average, seen = WeightAverage(step, 3), []
    for keys in ((1, 2), (1, 2), (1, 3)):  # the row of 2 goes to 3
        for _ in range(3):
            step(batch(*keys))
        average.note()
        seen.append(step.table_state()["weight.t0.0-4"].clone())
    row_of_3 = step.model.features.growing(batch(3).features).ids_BT.item()
    with average.in_place(9):
        mean = step.table_state()["weight.t0.0-4"].clone()
    expected = torch.stack(seen).mean(dim=0)
    expected[row_of_3] = seen[-1][row_of_3]
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(step.table_state()["weight.t0.0-4"], seen[-1], rtol=0, atol=0)
