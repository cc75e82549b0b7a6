from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhen.errors import UserError
from trials.data.raw import readers
from trials.data.raw.readers import BadRows, read_batches
from trials.data.raw.sources import open_log


def read(path: Path, columns: list[str], *, skip: bool = False) -> tuple[dict[str, list[object]], BadRows]:
    bad_rows, rows = BadRows(skip=skip), {name: [] for name in columns}
    for batch in read_batches(open_log([path]), columns, bad_rows):
        for name in columns:
            rows[name] += batch.table.column(name).to_pylist()
    return rows, bad_rows


TEXT = 'a,b,click\r\n1,x,0\r\n\r\n2,"y, ""z""\r\nsecond line",1\r\n"",NA,0\r\n'


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_quotes_line_ends_blank_lines_and_missing_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    rows, _ = read(path, ["a", "b"])
    assert rows == {"a": [b"1", b"2", None], "b": [b"x", b'y, "z"\r\nsecond line', None]}


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_a_ragged_row_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "log.csv"
    path.write_text(
        TEXT.replace("\r\n", "\n") + "3,w\n4,w,0\n"
    )  # a blank line and a quoted line end come before
    with pytest.raises(UserError, match=r"log.csv, line 7: expected 3 fields, found 2"):
        read(path, ["a"])
    rows, bad_rows = read(path, ["a"], skip=True)
    assert rows["a"] == [b"1", b"2", None, b"4"]
    assert bad_rows.notes() == ["rows skipped for a wrong number of fields: 1"]


def test_a_ragged_row_that_is_no_utf_8(tmp_path: Path) -> None:
    """Rows that are left out pass through a handler that Arrow calls with text alone."""
    path = tmp_path / "log.csv"
    path.write_bytes(b"a,b,click\r\ncaf\xe9,x,0\rna\xc3\xafve,y,1\n\xe9t\xe9,y,1,7\n,\xff,0\n")
    with pytest.raises(UserError, match=r"log.csv, line 4: expected 3 fields, found 4"):
        read(path, ["a"])
    rows, bad_rows = read(path, ["a", "b"], skip=True)
    assert rows == {"a": [b"caf\xe9", "na\u00efve".encode(), None], "b": [b"x", b"y", b"\xff"]}
    assert bad_rows.ragged == 1
    path.write_text('click\n""\n\n1\n1,2\n')  # an empty field in quotes is a row, an empty line is none
    with pytest.raises(UserError, match=r"log.csv, line 5: expected 1 fields, found 2"):
        read(path, ["click"])


def test_columns_that_folders_name(tmp_path: Path) -> None:
    for day, name in (("2026-11-01", "log.csv"), ("__HIVE_DEFAULT_PARTITION__", "log.csv")):
        folder = tmp_path / "clicks" / f"a b%3Dc={day}"
        folder.mkdir(parents=True)
        (folder / name).write_text("a,click\n1,0\n2,1\n")
    rows, _ = read(tmp_path / "clicks", ["click", "a b=c", "a"])
    assert rows["a b=c"] == [b"2026-11-01", b"2026-11-01", None, None]
    assert rows["click"] == [b"0", b"1"] * 2
    for skip in (False, True):  # by itself too
        rows, _ = read(tmp_path / "clicks", ["a b=c"], skip=skip)
        assert rows["a b=c"] == [b"2026-11-01", b"2026-11-01", None, None]
    for suffix in ("1", "2"):
        folder = tmp_path / "parquet" / f"dt={suffix}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"click": [0, 1]}), folder / "part-0.parquet")
    rows, _ = read(tmp_path / "parquet", ["dt", "click"])
    assert rows == {"dt": [b"1", b"1", b"2", b"2"], "click": [0, 1, 0, 1]}


def test_unclosed_quotes_and_cut_files(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('a,click\n1,"0\n2,1\n3,0\n')
    for columns in (["a"], ["a", "click"]):
        with pytest.raises(UserError, match="a quote in column 'click' is never closed"):
            read(path, columns)
    path.write_text('a,click\n1,0\n"ends a line\n",0\n')
    assert read(path, ["a", "click"])[0]["click"] == [b"0", b"0"]
    with pytest.raises(UserError, match=r"'z' are missing; the file has a, click"):
        read(path, ["z"])


def test_parquet_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PARQUET_ROWS", 2)
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"a": [1, None, 3], "t": [["x"], [], None], "click": [0, 1, 0]}), path)
    batches = list(read_batches(open_log([path]), ["t", "a"], BadRows(skip=False)))
    assert [batch.first_row for batch in batches] == [0, 2]
    assert batches[0].table.to_pydict() == {"t": [["x"], []], "a": [1, None]}
    assert batches[1].where(0) == f"{path}, row 3"
