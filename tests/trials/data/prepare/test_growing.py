"""Columns of growing tables are kept as hashes: no vocabulary, the same for every log and for scoring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dhen.errors import UserError
from dhen.schema import Growing
from trials.data.encoding import encode_rows
from trials.data.loader import eval_batches
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.read_options import GivenGrowing, ReadOptions
from trials.data.schema_yaml import parse_schema, read_schema
from trials.data.vocabulary import hash64

GIVEN = GivenGrowing(capacity=40, columns=("country", "tags"), admit_after=3, evict="lru", ttl=9)


@pytest.fixture
def log(clicks: dict[str, list[object]], write_csv: Callable[..., Path], tmp_path: Path) -> PreparedLog:
    return prepare([write_csv(clicks)], out=tmp_path / "log", options=ReadOptions(growing=GIVEN))


def test_keys_are_the_hashes_of_the_values(
    log: PreparedLog, clicks: dict[str, list[object]], tmp_path: Path
) -> None:
    tables = {table.name: table for table in log.features.tables}
    rule = Growing(capacity=40, admit_after=3, evict="lru", ttl=9)
    assert tables["country"].growing == tables["tags"].growing == rule
    assert tables["country"].rows == tables["tags"].rows == 41
    assert tables["user_id"].growing is None
    assert not [
        path for path in (tmp_path / "log" / "encoding" / "vocabulary").iterdir() if "tags" in path.name
    ]
    split, rows = log.split("train"), log.manifest.rows["train"]
    countries = [str(value) for value in clicks["country"][:rows]]
    expected = hash64(pa.array(countries)).view(np.int64)
    keys = split.inputs.keys[:, 0]
    assert keys.tolist() == [
        key if name else 0 for key, name in zip(expected.tolist(), countries, strict=True)
    ]
    place = [table.name for table in log.features.categorical].index("country")
    assert not split.inputs.categorical[:, place].any()
    tags = [tag for value in clicks["tags"][:rows] for tag in str(value).split("|") if tag]
    assert split.inputs.bags[0].ids.tolist() == hash64(pa.array(tags)).view(np.int64).tolist()


def test_rows_to_score_are_encoded_alike(
    log: PreparedLog, clicks: dict[str, list[object]], write_csv: Callable[..., Path]
) -> None:
    (rows,) = encode_rows([write_csv(clicks, "again.csv")], log.encoding)
    split = log.split("train")
    assert split.inputs.keys is not None
    assert np.array_equal(rows.keys[: split.rows], split.inputs.keys)
    batch = next(eval_batches(split, batch_size=16)).features
    assert batch.keys.columns_BG.shape == (16, 1)
    assert batch.keys.bags[0].dtype == batch.keys.columns_BG.dtype
    assert log.encoding.value_names("country", [0, -1]) == ["(missing)", "hash ffffffffffffffff"]


def test_schema_yaml_says_it_and_reads_it_back(log: PreparedLog, tmp_path: Path) -> None:
    schema = read_schema(tmp_path / "log" / "schema.yaml")
    assert schema.growing("country") == Growing(capacity=40, admit_after=3, evict="lru", ttl=9)
    assert schema.growing("user_id") is None
    text = (tmp_path / "log" / "schema.yaml").read_text()
    assert "table: {growing: {capacity: 40, admit_after: 3, evict: lru, ttl: 9}}" in text
    assert text.count("table: {growing: {capacity: 40,") == 2
    assert "'tags' has a growing table of 40 rows at most" in " ".join(log.notes)
    assert PreparedLog.open(tmp_path / "log").fingerprint == log.fingerprint


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"hash_buckets": 100}, "growing table is not hashed into buckets"),
        ({"min_count": 5}, "no min_count.*admit_after"),
        ({"table": {"growing": {}}}, "table.growing.capacity"),
        ({"table": {"growing": {"capacity": 0}}}, "greater than 0.*received 0"),
        ({"table": {"growing": {"capacity": 10, "evict": "fifo"}}}, "lfu.*lru.*fifo"),
        ({"table": {"groving": {"capacity": 10}}}, "Did you mean 'table.growing'"),
    ],
)
def test_what_cannot_be_is_said(column: dict[str, object], message: str) -> None:
    table = {"role": "categorical", "table": {"growing": {"capacity": 10}}} | column
    columns = {"click": {"role": "label"}, "user": table}
    with pytest.raises(UserError, match=message):
        parse_schema({"columns": columns}, "schema.yaml")
