from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from dhen.values import parse
from trials.data.log_schema import SplitRule
from trials.data.prepare import splits
from trials.data.prepare.splits import StampCounts, check_names, plan_splits
from trials.data.raw.columns import MISSING_STAMP, coded

stamp_lists = st.lists(
    st.one_of(st.integers(0, 30), st.integers(-(10**6), 10**14), st.just(MISSING_STAMP)),
    min_size=3,
    max_size=200,
)
fractions = st.tuples(st.floats(0.05, 0.4), st.floats(0.05, 0.4))


@given(stamp_lists, fractions, st.integers(3, 50), st.integers(1, 60))
def test_no_split_by_time_leaks(
    values: list[int], parts: tuple[float, float], max_cells: int, batch_rows: int
) -> None:
    """Later splits are later, equal stamps stay together, no split is empty, however coarsely they are counted."""
    stamps = np.array(values, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "MAX_CELLS", max_cells)
        counts = StampCounts()
        for first in range(0, len(stamps), batch_rows):
            counts.add(stamps[first : first + batch_rows])
    known = stamps[stamps != MISSING_STAMP]
    assert counts.missing == len(stamps) - len(known)
    assert counts.chronological == bool(np.all(np.diff(known) >= 0))
    rule = SplitRule(by="timestamp", validation=parts[0], test=parts[1])
    try:
        plan = plan_splits(rule, len(stamps), counts)
    except UserError:
        assert len(np.unique(known)) < 3 or max_cells < 8  # outliers may leave two coarse cells
        return
    of = plan.of("a", 0, len(stamps), stamps, None)
    assert not of[stamps == MISSING_STAMP].any()
    train, validation, test = (stamps[(of == i) & (stamps != MISSING_STAMP)] for i in range(3))
    assert min(len(train), len(validation), len(test)) > 0
    assert train.max() < validation.min()
    assert validation.max() < test.min()


def test_fractions_are_met_where_stamps_are_fine() -> None:
    counts = StampCounts()
    rng = np.random.default_rng(0)
    stamps = np.concatenate(
        [rng.integers(0, 86_400_000 * 30, 300_000), [253_402_300_799_000, -1]]
    )  # two outliers
    for part in np.array_split(stamps, 20):
        counts.add(part)
    plan = plan_splits(SplitRule(by="timestamp", validation=0.1, test=0.2), len(stamps), counts)
    shares = np.bincount(plan.of("", 0, len(stamps), stamps, None)) / len(stamps)
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.001)


@given(st.integers(3, 500), fractions)
def test_order(rows: int, parts: tuple[float, float]) -> None:
    plan = plan_splits(SplitRule(by="order", validation=parts[0], test=parts[1]), rows, None)
    whole = plan.of("a", 0, rows, None, None)
    assert np.all(np.diff(whole.astype(int)) >= 0)
    assert set(whole) == {0, 1, 2}
    np.testing.assert_allclose(np.mean(whole == 2), parts[1], atol=1.5 / rows)
    half = rows // 2
    assert np.array_equal(
        np.concatenate([plan.of("a", 0, half, None, None), plan.of("a", half, rows - half, None, None)]),
        whole,
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=20, max_size=80), st.floats(0.05, 0.6))
def test_a_fraction_is_of_the_files_that_are_not_listed(
    parts: list[tuple[bool, int]], fraction: float
) -> None:
    """By order, with the test files anywhere between the others, in batches of any size."""
    rule = SplitRule(by="order", validation=fraction, test=("test.csv",))
    batches = [("test.csv" if listed else "train.csv", rows) for listed, rows in [*parts, (False, 2)]]
    open_rows = sum(rows for file, rows in batches if file == "train.csv")
    plan, splits, before = plan_splits(rule, open_rows, None), [], 0
    for file, rows in batches:
        of = plan.of(file, before, rows, None, None)
        if file == "test.csv":
            assert set(of) <= {2}
        else:
            splits += of.tolist()
            before += rows
    assert splits == sorted(splits)
    assert set(splits) == {0, 1}
    assert abs(splits.count(1) - fraction * open_rows) <= 1


def test_values_of_a_column() -> None:
    values = coded(pa.array(["train", "val", None, "test", "dev", "train"]))
    both = SplitRule(by="column", validation=("val", "dev"), test=("test",))
    assert plan_splits(both, 0, None).of("a", 0, 6, None, values).tolist() == [0, 1, 0, 2, 1, 0]
    one = SplitRule(by="order", validation=0.4, test=("test",))
    assert plan_splits(one, 5, None).of("a", 0, 6, None, values).tolist() == [0, 0, 0, 2, 1, 1]
    with pytest.raises(UserError, match=r"unknown value of column 'split' 'dev'\. Known: test, val\."):
        check_names(both, (), "split", {"val", "test"})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"by": "files", "validation": 0.1, "test": ["a"]}, "give `by: timestamp` or `by: order`"),
        ({"by": "order", "validation": ["b"], "test": ["a"]}, "nothing is cut by order: give `by: files`"),
        ({"by": "order", "validation": 1.0, "test": ["a"]}, "fractions above 0 that leave rows for training"),
        ({"by": "order", "validation": 0.5, "test": 0.5}, "fractions above 0 that leave rows for training"),
        (
            {"by": "order", "test": ["a", 0.1]},
            r"a fraction stands alone, e\.g\. 0\.1; received \['a', 0\.1\]",
        ),
        ({"by": "order", "test": []}, "a list of files or values is empty"),
        ({"by": "order", "test": "a.csv"}, r"names stand in a list, also a single one: \[a\.csv\]"),
        ({"by": "files", "validation": ["a"], "test": ["a"]}, "a file is both in validation and in test"),
    ],
)
def test_rules_that_do_not_go_together_say_what_would(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(SplitRule, rule, "schema.yaml: split")


def test_too_little_to_split() -> None:
    with pytest.raises(UserError, match="the log has 2 rows"):
        plan_splits(SplitRule(), 2, None)
    counts = StampCounts()
    counts.add(np.array([1, 1, 2]))
    with pytest.raises(UserError, match=r"the log has 2: use `by: order`"):
        plan_splits(SplitRule(by="timestamp"), 3, counts)
    with pytest.raises(
        UserError, match="split: test takes all rows but one: training and validation need one"
    ):
        plan_splits(SplitRule(by="order", test=("a.csv",)), 1, None)
    single = StampCounts()
    single.add(np.array([7, 7, 9]), np.array([True, True, False]))
    with pytest.raises(UserError, match=r"needs two distinct ones, the rows that are not given have 1"):
        plan_splits(SplitRule(by="timestamp", test=("a.csv",)), 2, single)
