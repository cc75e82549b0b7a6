from __future__ import annotations

import pyarrow as pa
import pytest

from dhen.errors import UserError
from trials.data.log_schema import LabelColumn
from trials.data.raw.typed import LabelReader


def reader(positive: str | None = None) -> LabelReader:
    return LabelReader("click", LabelColumn(positive=positive), "log.csv")


def test_plain_and_typed_labels() -> None:
    pairs = ("0 1", "0.0 1.0", "-1 1", "false true", "No YES", "noclick click", "f t")
    for negative, positive in map(str.split, pairs):
        labels, missing, _ = reader().read(pa.array([positive, negative, f" {positive} "]))
        assert labels.tolist() == [1, 0, 1], positive
        assert not missing.any()
    for column in (pa.array([True, False]), pa.array([1.0, 0.0]), pa.array([1, -1], pa.int8())):
        assert reader().read(column)[0].tolist() == [1, 0], column


def test_a_named_positive() -> None:
    labels = reader(">50K")
    assert labels.read(pa.array([">50K", "<=50K"]))[0].tolist() == [1, 0]
    assert reader("2").read(pa.array([1.0, 2.0]))[0].tolist() == [0, 1]


def test_unknown_labels_ask_for_the_positive() -> None:
    with pytest.raises(UserError, match=r"holds 'bought', 'left'.*`positive:`"):
        reader().read(pa.array(["bought", "left"]))


def test_more_than_two_values_over_several_batches() -> None:
    labels = reader()
    labels.read(pa.array(["0", "1"]))
    with pytest.raises(UserError, match="more than two values: '0', '1', '2'"):
        labels.read(pa.array(["2"]))
    with pytest.raises(UserError, match="and 15 more"):
        reader().read(pa.array([str(value) for value in range(25)]))


def test_missing_labels_and_one_class() -> None:
    labels = reader()
    assert labels.read(pa.array(["0", None, "1", ""]))[1].tolist() == [False, True, False, True]
    with pytest.raises(UserError, match="2 of 4 rows have no label"):
        labels.check(4, skipping=False)
    labels.check(4, skipping=True)
    single = reader()
    single.read(pa.array(["0", "0"]))
    with pytest.raises(UserError, match="only one class: '0'"):
        single.check(2, skipping=False)
    misspelt = reader("clck")
    misspelt.read(pa.array(["click", "no"]))
    with pytest.raises(UserError, match="says that 'clck' is the positive one"):
        misspelt.check(2, skipping=False)


def test_a_category_that_no_row_has_any_more_is_no_class() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1]), pa.array(["0", "1", "unknown"]))
    labels = reader()
    assert labels.read(column)[0].tolist() == [0, 1, 1]
    labels.check(3, skipping=False)
    ones = reader()
    ones.read(pa.DictionaryArray.from_arrays(pa.array([1, 1]), pa.array(["0", "1"])))
    with pytest.raises(UserError, match="only one class"):
        ones.check(2, skipping=False)
