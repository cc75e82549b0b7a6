from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dhen.errors import UserError
from trials.data.encoding import EncodedRows, Encoding, encode_rows, transform
from trials.data.prepare.prepare_log import prepare
from trials.data.raw import readers

Columns = dict[str, list[Any]]


def joined(parts: list[EncodedRows]) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    bags = [
        bags.ids[a:b].tolist()
        for part in parts
        for bags in part.bags
        for a, b in zip(bags.offsets, bags.offsets[1:], strict=False)
    ]
    return np.concatenate([p.categorical for p in parts]), np.concatenate([p.numeric for p in parts]), bags


def test_raw_files_score_as_the_cache_does(
    clicks: Columns, write_csv: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_csv(clicks)
    log = prepare([path])
    whole = joined(list(encode_rows([path], log.encoding)))
    monkeypatch.setattr(readers, "BLOCK_BYTES", 4096)
    parts = list(encode_rows([path], log.encoding, batch_size=7))
    assert max(part.rows for part in parts) == 7
    small = joined(parts)
    cached = joined([log.split(name).inputs for name in ("train", "validation", "test")])
    for other in (small, cached):
        assert np.array_equal(whole[0], other[0])
        assert np.array_equal(whole[1], other[1])
        assert whole[2] == other[2]


def test_no_label_is_needed_and_other_columns_do_not_matter(
    clicks: Columns, write_csv: Callable[..., Path]
) -> None:
    encoding = prepare([write_csv(clicks)]).encoding
    reduced = {"more": clicks["click"], **{name: clicks[name] for name in reversed(encoding.schema.inputs)}}
    rows = joined(list(encode_rows([write_csv(reduced, "new.csv")], encoding)))
    assert np.array_equal(rows[0], joined(list(encode_rows([write_csv(clicks)], encoding)))[0])


def test_missing_inputs_are_all_listed(clicks: Columns, write_csv: Callable[..., Path]) -> None:
    encoding = prepare([write_csv(clicks)]).encoding
    del clicks["tags"], clicks["price"]
    with pytest.raises(UserError, match=r"the columns 'tags', 'price' are missing.*the log has request_id, "):
        encode_rows([write_csv(clicks, "new.csv")], encoding)
    with pytest.raises(UserError, match="'tags', 'price' are missing"):
        transform(pa.RecordBatch.from_pydict(clicks), encoding)


def test_rows_that_cannot_be_scored(clicks: Columns, write_csv: Callable[..., Path], tmp_path: Path) -> None:
    encoding: Encoding = prepare([write_csv(clicks)]).encoding
    clicks["price"][41] = "12 EUR"
    path = write_csv(clicks, "new.csv")
    with pytest.raises(
        UserError, match=r"new.csv, line 43: column 'price' holds '12 EUR', which is no number"
    ):
        list(encode_rows([path], encoding))
    path.write_text(path.read_text().replace("12 EUR", "12,5"))
    with pytest.raises(UserError, match=r"line 43: expected 9 fields, found 10"):
        list(encode_rows([path], encoding))
