from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data.prepare import fit
from trials.data.prepare.fit import ValueCounts
from trials.data.raw.columns import spelled
from trials.data.vocabulary import UNKNOWN_ID, Vocabulary, hash64, hashed_ids

texts = st.text(max_size=6).filter(lambda text: spelled(pa.array([text]))[0].as_py() == text)


def counted(values: list[str]) -> pa.Table:
    counts = Counter(values)
    return pa.table({"value": pa.array(counts, pa.string()), "count": pa.array(counts.values(), pa.int64())})


@given(st.lists(texts), st.integers(1, 3), st.lists(texts))
def test_ids_are_ordered_by_frequency_then_text(
    values: list[str], min_count: int, queries: list[str]
) -> None:
    vocabulary = Vocabulary.fit(counted(values), min_count)
    kept = [(-count, value.encode()) for value, count in Counter(values).items() if count >= min_count]
    expected = {value.decode(): 2 + place for place, (_, value) in enumerate(sorted(kept))}
    asked = list(dict.fromkeys([*queries, *values]))
    ids = vocabulary.ids(pa.array(asked, pa.string()))
    assert ids.tolist() == [expected.get(value, UNKNOWN_ID) for value in asked]


@given(st.lists(st.lists(st.one_of(st.none(), st.sampled_from("abcdef"))), max_size=8))
def test_counting_in_batches(batches: list[list[str | None]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "COMPACT_AT", 2)
        counts = ValueCounts()
        for batch in batches:
            counts.add(pa.array(batch, pa.string()).dictionary_encode())
    expected = Counter(value for batch in batches for value in batch if value is not None)
    assert {row["value"]: row["count"] for row in counts.table().to_pylist()} == expected
    assert counts.total == expected.total()


def test_the_hash_never_changes() -> None:
    """Bundles and caches depend on it."""
    assert [f"{h:016x}" for h in hash64(pa.array(["", "a", "68fd1e64", "Curaçao"]))] == [
        "0000000000000000",
        "ee8c2baf6343e5c3",
        "d40df4134ce68c6a",
        "0b2cdd0fa0c20f91",
    ]
    assert hashed_ids(pa.array(["a", "68fd1e64"]), 1000).tolist() == [893, 572]


@given(st.lists(st.text(max_size=40), unique=True, max_size=60), st.integers(0, 5))
def test_hashes_of_slices_and_of_different_texts(values: list[str], start: int) -> None:
    array = pa.array(values, pa.string())
    hashes = hash64(array)
    assert np.array_equal(hash64(array.slice(start)), hashes[start:])
    assert len(np.unique(hashes)) == len(values)


def test_hash_buckets_are_even() -> None:
    ids = hashed_ids(pa.array([f"user-{i}" for i in range(40_000)]), 64)
    assert ids.min() == 2
    shares = np.bincount(ids - 2, minlength=64) / len(ids) * 64
    assert 0.8 < shares.min() <= shares.max() < 1.2


def test_a_vocabulary_of_before_values_had_one_spelling_finds_them(tmp_path: Path) -> None:
    earlier = Vocabulary(pa.table({"value": ["3.0", "True", "3", "a.0"], "count": [9, 5, 2, 1]}))
    earlier.save(tmp_path / "values")
    read = Vocabulary.load(tmp_path / "values")
    assert read.ids(pa.array(["3", "true", "a.0", "4"])).tolist() == [2, 3, 5, UNKNOWN_ID]
    assert read.name(0) == "3.0"
