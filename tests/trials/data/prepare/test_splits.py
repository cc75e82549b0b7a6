from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from trials.data.log_schema import SplitRule
from trials.data.prepare import splits
from trials.data.prepare.splits import StampCounts, plan_splits
from trials.data.raw.stamps import MISSING_STAMP

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
        plan = plan_splits(rule, len(stamps), ["a"], counts)
    except UserError:
        assert len(np.unique(known)) < 3 or max_cells < 8  # outliers may leave two coarse cells
        return
    of = plan.of("a", 0, len(stamps), stamps)
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
    plan = plan_splits(SplitRule(by="timestamp", validation=0.1, test=0.2), len(stamps), [], counts)
    shares = np.bincount(plan.of("", 0, len(stamps), stamps)) / len(stamps)
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.001)


def test_three_days() -> None:
    counts = StampCounts()
    days = np.repeat([10, 20, 30], 100)
    counts.add(days)
    plan = plan_splits(SplitRule(by="timestamp"), 300, [], counts)
    assert np.bincount(plan.of("", 0, 300, days)).tolist() == [100, 100, 100]


@given(st.integers(3, 500), fractions)
def test_order(rows: int, parts: tuple[float, float]) -> None:
    plan = plan_splits(SplitRule(by="order", validation=parts[0], test=parts[1]), rows, [], None)
    whole = plan.of("a", 0, rows, None)
    assert np.all(np.diff(whole.astype(int)) >= 0)
    assert set(whole) == {0, 1, 2}
    np.testing.assert_allclose(np.mean(whole == 2), parts[1], atol=1.5 / rows)
    half = rows // 2
    assert np.array_equal(
        np.concatenate([plan.of("a", 0, half, None), plan.of("a", half, rows - half, None)]), whole
    )


def test_files() -> None:
    rule = SplitRule(by="files", validation=("b.csv",), test=("c.csv",))
    plan = plan_splits(rule, 9, ["a.csv", "b.csv", "c.csv", "d.csv"], None)
    assert [int(plan.of(name, 0, 1, None)[0]) for name in ("a.csv", "b.csv", "c.csv", "d.csv")] == [
        0,
        1,
        2,
        0,
    ]
    with pytest.raises(UserError, match=r"unknown file 'b\.csv'"):
        plan_splits(rule, 9, ["a.csv", "c.csv"], None)


def test_too_little_to_split() -> None:
    with pytest.raises(UserError, match="the log has 2 rows"):
        plan_splits(SplitRule(), 2, [], None)
    counts = StampCounts()
    counts.add(np.array([1, 1, 2]))
    with pytest.raises(UserError, match=r"the log has 2: use `split: \{by: order\}`"):
        plan_splits(SplitRule(by="timestamp"), 3, [], counts)
