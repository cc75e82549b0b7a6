"""Buckets of numbers: equal shares of the training rows, and the tables that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data.encoding import Encoding, transform
from trials.data.log_schema import NumericColumn
from trials.data.prepare import fit
from trials.data.prepare.fit import Quantiles
from trials.data.prepare.prepare_log import prepare
from trials.data.roles.infer import infer_schema
from trials.data.vocabulary import Buckets, quantile_buckets

Columns = dict[str, list[Any]]
TRAIN = 480  # of 600 rows, in the order of the log


def fullest(values: list[float], begins: tuple[float, ...]) -> int:
    """Values in the fullest bucket that has several distinct ones; 1 where each has one."""
    buckets: dict[int, Counter[float]] = {}
    for value in values:
        buckets.setdefault(sum(value >= begin for begin in begins), Counter())[value] += 1
    return max((each.total() for each in buckets.values() if len(each) > 1), default=1)


@given(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=30), st.integers(2, 5))
def test_no_other_buckets_are_more_even(values: list[float], most: int) -> None:
    found = quantile_buckets(np.array(values), most)
    assert len(found) <= most
    assert set(found.begins) <= set(values) - {min(values)}
    others = (
        begins for count in range(most) for begins in combinations(sorted(set(values) - {min(values)}), count)
    )
    assert fullest(values, found.begins) == min(fullest(values, begins) for begins in others)


def test_a_value_of_most_rows_has_a_bucket_of_its_own() -> None:
    amounts = np.concatenate([np.zeros(900), np.arange(1.0, 101.0)])
    found = quantile_buckets(amounts, 11)
    assert np.bincount(found.ids(amounts))[2:].tolist() == [900, *[10] * 10]


@given(st.lists(st.floats(-1e300, 1e300), min_size=1), st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_greater_numbers_are_not_in_lesser_buckets(values: list[float], one: float, other: float) -> None:
    found = quantile_buckets(np.array(values), 4)
    ids = found.ids(np.array([min(one, other), max(one, other), np.nan])).tolist()
    assert 2 <= ids[0] <= ids[1] < 2 + len(found)
    assert ids[2] == 0


def test_names() -> None:
    buckets = Buckets(begins=(17.0, 1e6))
    assert [buckets.name(place) for place in range(3)] == ["below 17", "17 to below 1e+06", "from 1e+06"]


def test_the_sample_is_one_of_the_rows_not_of_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "SAMPLE", 1000)
    values = np.random.default_rng(1).normal(size=20_000)
    values[::7] = np.nan

    def sampled(batch: int) -> Buckets:
        quantiles = Quantiles(8)
        for first in range(0, len(values), batch):
            quantiles.add(pa.array(values[first : first + batch]))
        found = quantiles.buckets()
        assert found is not None
        return found

    found = sampled(64)
    assert found == sampled(20_000) == sampled(3_333)
    shares = np.bincount(found.ids(values))[2:] / np.isfinite(values).sum()
    np.testing.assert_allclose(shares, 1 / 8, atol=0.04)  # of 1,000 values an eighth is known to .01


@pytest.fixture
def encoding(clicks: Columns, write_csv: Callable[..., Path]) -> Encoding:
    """Eight buckets of the price, and five of a number that is always the same."""
    path = write_csv({**clicks, "price": clicks["price"], "constant": [3.5] * 600})
    schema = infer_schema([path])
    columns = dict(schema.columns) | {
        "price": NumericColumn(buckets=8),
        "dwell_seconds": NumericColumn(),
        "constant": NumericColumn(buckets=5),
    }
    log = prepare([path], schema=schema.replace(columns=columns))
    assert "no table constant__bucket: 'constant' does not vary in the training rows" in log.notes
    return log.encoding


def test_a_table_of_buckets(encoding: Encoding, clicks: Columns) -> None:
    names = [table.name for table in encoding.features.categorical]
    assert [name for name in names if name.endswith("__bucket")] == ["price__bucket"]
    place = names.index("price__bucket")
    expected = quantile_buckets(np.array([p for p in clicks["price"][:TRAIN] if p != ""], dtype=float), 8)
    prices = ["-1e9", "?", "12.5", "1e9"]
    batch = {name: [None] * 4 for name in encoding.schema.inputs} | {"price": prices}
    ids = transform(pa.RecordBatch.from_pydict(batch), encoding).categorical[:, place].tolist()
    assert ids == expected.ids(np.array([-1e9, np.nan, 12.5, 1e9])).tolist()
    assert ids[:2] + ids[3:] == [2, 0, encoding.features.categorical[place].rows - 1]
    assert encoding.value_names("price__bucket", ids[:2]) == [expected.name(0), "(missing)"]


def test_shares_are_of_the_transformed_number(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    """Half of the way in logarithms between two beginnings, the lower one of which is even."""
    path = write_csv(clicks)
    schema = infer_schema([path])
    numeric = {
        "dwell_seconds": NumericColumn(buckets=3),
        "price": NumericColumn(transform="log", buckets=8),
    }
    log = prepare([path], schema=schema.replace(columns=dict(schema.columns) | numeric))
    tables = [table.name for table in log.features.bucketed]
    begins = quantile_buckets(
        np.array([p for p in clicks["price"][:TRAIN] if p != ""], dtype=float), 8
    ).begins
    between = float(np.sqrt((1 + begins[1]) * (1 + begins[2])) - 1)
    prices = [str(begins[1]), str(between), str(begins[2]), "?", "-1e9", "1e9"]
    batch = {name: [None] * len(prices) for name in log.schema.inputs} | {"price": prices}
    share = transform(pa.RecordBatch.from_pydict(batch), log.encoding).share
    assert share[:, tables.index("price__bucket")].tolist() == pytest.approx([0, 0.5, 1, 0, 0, 1], abs=1e-6)
    assert share[:, tables.index("dwell_seconds__bucket")].tolist() == [0] * len(prices)
    kept = log.split("train").inputs.share
    assert kept.shape == (log.manifest.rows["train"], 2)


def test_they_are_kept_and_count_in_the_fingerprint(encoding: Encoding, tmp_path: Path) -> None:
    encoding.save(tmp_path)
    again = Encoding.load(tmp_path)
    assert (again.fingerprint, again.features) == (encoding.fingerprint, encoding.features)
    numbers = tmp_path / "numeric.json"
    first = encoding.value_names("price__bucket", [2])[0].removeprefix("below ")
    moved = numbers.read_text().replace(f"    {first}", f"    {float(first) - 1}", 1)
    assert moved != numbers.read_text()
    numbers.write_text(moved)
    assert Encoding.load(tmp_path).fingerprint != encoding.fingerprint
