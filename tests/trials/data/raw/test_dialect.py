from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhen.errors import UserError
from trials.data.encoding import encode_rows
from trials.data.log_schema import UNSAID, GivenDialect
from trials.data.prepare.prepare_log import prepare
from trials.data.raw import sources
from trials.data.raw.readers import BadRows, read_batches
from trials.data.raw.sources import open_log
from trials.data.read_options import ReadOptions

Table = list[list[str | None]]
TITLES = ['5" phone, black', "plain", 'the "best" one', "a; b", "it's"]
ROWS: Table = [[f"u{i % 7}", TITLES[i % 5], f"{i / 4:.2f}", str(i % 2)] for i in range(60)]
NAMES = ["user", "title", "price, EUR", "click"]


def written(path: Path, rows: Table, **how: object) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n", **how).writerows(rows)
    return path


def read(path: Path, said: GivenDialect = UNSAID, usual: GivenDialect | None = None) -> Table:
    """The names of the columns, then all rows."""
    log = open_log([path], None, said, usual)
    rows: Table = [list(log.columns)]
    for batch in read_batches(log, log.columns, BadRows(skip=False)):
        columns = (column.to_pylist() for column in batch.table.columns)
        rows += [[value and value.decode() for value in row] for row in zip(*columns, strict=True)]
    return rows


BACKSLASHED = {"doublequote": False, "escapechar": "\\"}
PLAIN_TITLES: Table = [[*row[:1], "x y", *row[2:]] for row in ROWS]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", "\x01", "~", "^", " "])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"quoting": csv.QUOTE_ALL},
        {"quoting": csv.QUOTE_ALL, **BACKSLASHED},
        BACKSLASHED,
        {"quoting": csv.QUOTE_NONE, "quotechar": None, "escapechar": "\\"},
    ],
)
def test_what_was_written_is_read(tmp_path: Path, delimiter: str, how: dict[str, object]) -> None:
    table = [NAMES, *ROWS]
    assert read(written(tmp_path / "log.csv", table, delimiter=delimiter, **how)) == table


def test_single_quotes(tmp_path: Path) -> None:
    for how in ({}, BACKSLASHED):
        path = written(tmp_path / "log.csv", [NAMES, *ROWS], quotechar="'", **how)
        assert read(path) == [NAMES, *ROWS]


@pytest.mark.parametrize("delimiter", [";", "~"])
@pytest.mark.parametrize(
    "before",
    [
        "sep={}\n",
        "# made by x\n# on Monday, at 10\n# a, b, c\n",
        "Clicks\nfrom May, to June\n\n",
        "\n\n\n",
        "Clicks; views: all\n\n\n",
        "#user{0}#title{0}#price{0}#click\n",
    ],
)
def test_lines_before_the_header(tmp_path: Path, delimiter: str, before: str) -> None:
    path = written(tmp_path / "log.csv", [NAMES, *PLAIN_TITLES], delimiter=delimiter)
    path.write_text("\ufeff" + before.format(delimiter) + path.read_text())
    assert read(path) == [NAMES, *PLAIN_TITLES]
    assert open_log([path]).files[0].where(2) == f"{path}, line {before.count(chr(10)) + 4}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user;price, EUR;click\n" + "a;1,5;0\nb;2,5;1\n" * 9, ("user", "price, EUR", "click")),
        ("user|a;b|click\n" + "a|1;5|0\nb|2;5|1\n" * 9, ("user", "a;b", "click")),
        ("#user,price,click\n" + "a,1,0\nb,2,1\n" * 9, ("#user", "price", "click")),
        ("x,x,x.1,,x,click\n" + "1,2,3,4,5,0\n" * 9, ("x", "x.2", "x.1", "column_4", "x.3", "click")),
        ("user,title,click\n" + 'a,{"b": "say \\"hi\\""},0\nb,plain,1\n' * 9, ("user", "title", "click")),
    ],
)
def test_headers(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    assert open_log([path]).columns == expected


def test_backslashes_that_escape_nothing_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,path,click\n" + 'a,"C:\\dir\\",0\nb,"say ""x"" \\",1\n' * 9)
    assert read(path)[1:3] == [["a", "C:\\dir\\", "0"], ["b", 'say "x" \\', "1"]]
    path.write_text("user,path,click\n" + 'a,\\N,0\nb\\c,"5\\" \\\\ x",1\n' * 9)
    assert read(path)[1:3] == [["a", None, "0"], ["b\\c", '5" \\ x', "1"]]


@pytest.mark.parametrize("packed", [False, True])
def test_an_escape_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """The sniffer sees the beginning alone; the pass that hashes a file sees all of it."""
    monkeypatch.setattr(sources, "HEAD_BYTES", 4000)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)
    rows: Table = [NAMES, *PLAIN_TITLES * 20, *ROWS]
    path = written(tmp_path / "log.csv", rows, quoting=csv.QUOTE_ALL, **BACKSLASHED)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert read(path) == rows


def test_quotes_that_are_text(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user\ttitle\tclick\n" + 'a\t"best" one\t0\nb\t"half\t1\n' * 9)
    assert read(path)[1:3] == [["a", '"best" one', "0"], ["b", '"half', "1"]]
    path.write_text("user,title,click\n" + "a,one,0\nb,two,1\n" * 9 + 'c,half,"1\n')
    assert read(path, GivenDialect(quote=""))[-1] == ["c", "half", '"1']
    with pytest.raises(UserError, match=r"never closed.*csv\.quote="):
        read(path)


def test_files_beside_a_log_without_header(tmp_path: Path) -> None:
    path = tmp_path / "access.csv"
    path.write_text("".join(f"{i % 7},{i * i},{i % 5},{i % 2}\n" for i in range(300)))
    with pytest.raises(UserError, match=r"csv\.header=no label=c3\n      'c0': 0, 1, 2; 'c1': 0, 1, 4"):
        prepare([path])
    log = prepare([path], options=ReadOptions(label="c3", csv=GivenDialect(header=False)))
    assert log.encoding.schema.csv == GivenDialect(header=False)
    for text in ("3;9;1\n", "c1\tc0\tc2\n9\t3\t1\n"):  # one row without a header, and one with
        (tmp_path / "one.csv").write_text(text)
        (row,) = encode_rows([tmp_path / "one.csv"], log.encoding)
        assert row.rows == 1
    again = prepare([path], schema=log.encoding.schema, of_another_log=True)
    assert again.fingerprint == log.fingerprint


def test_one_column_that_may_be_several(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user+click\n" + "a-0\nb-1\n" * 9)
    assert read(path)[0] == ["user+click"]
    path.write_text("user;click\n" + "a-0\nb-1\n" * 9)
    with pytest.raises(UserError, match=r"'csv\.delimiter=;'\n.*'user': .*\n  csv\.delimiter=,\n"):
        read(path)


def test_rows_are_the_same_however_they_are_written(tmp_path: Path) -> None:
    names = ["user", "title", "price", "click"]
    plain = prepare([written(tmp_path / "plain.csv", [names, *ROWS])])
    other = written(tmp_path / "other.tsv", [names, *ROWS], delimiter="\t", **BACKSLASHED)
    log = prepare([other])
    assert log.encoding.fingerprint == plain.encoding.fingerprint
    assert log.encoding.schema.csv == GivenDialect(delimiter="\t", escape="\\")
    assert any("read with \\t between fields" in note for note in log.notes)
    assert plain.encoding.schema.csv == UNSAID
    assert not any("read with" in note for note in plain.notes)
    rows = [next(encode_rows([path], plain.encoding)) for path in (tmp_path / "plain.csv", other)]
    assert rows[0].categorical.tolist() == rows[1].categorical.tolist()
    both = open_log([tmp_path / "plain.csv", other])
    assert [file.dialect.delimiter for file in both.files] == [",", "\t"]
    assert both.csv == UNSAID


def test_odd_bytes_are_noted_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"user,city,click\r\n" + b"a,caf\xe9,0\nb,x,1\r\n" * 50)
    log = prepare([path], options=ReadOptions(label="click"))
    assert sum(log.summary().rows.values()) == 100
    assert "log.csv: values that are no UTF-8 are read as Latin-1" in log.notes
    assert "log.csv: lines end in several ways, all of which count" in log.notes
    assert "café" in log.encoding.value_names("city", range(4))


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(st.text('ab",;\\ \n', min_size=1, max_size=6), st.sampled_from("01")),
        min_size=4,
        max_size=12,
    )
)
def test_any_table_by_the_keys_that_fit(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = written(
        tmp_path_factory.mktemp("any") / "log.csv",
        [["text", "click"], *map(list, rows)],
        quoting=csv.QUOTE_ALL,
        **BACKSLASHED,
    )
    assert read(path, GivenDialect(escape="\\", header=True))[1:] == [list(row) for row in rows]
