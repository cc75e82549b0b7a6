"""The dialect of a text file: what separates fields, how they are quoted, and which line is the header.

DuckDB's sniffer proposes, our own parser judges: of all readings the one counts in which most records are equally
long. Lines are Latin-1, in which each byte is a character.
"""

from __future__ import annotations

import csv
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dhen.errors import UserError
from trials.data.log_schema import PLAIN_CSV, UNSAID, CsvDialect, GivenDialect
from trials.data.raw.files import records_of
from trials.data.raw.typed import plain_label

_COMMON = ",;\t|"
_WITHIN_WORDS = set("_-.+/\\\"'()[]{}\r\n")
"""Characters that separate no fields: they stand in names and numbers."""
_MARKS = {"delimiter": "delim", "quote": "quote", "escape": "escape"}
"""Fields of a dialect that the sniffer finds, and what it calls them."""
_MOST_LINES = 2000
"""Number of lines from which a dialect is judged; the sniffer sees all of the file's beginning."""
_NUMBER = re.compile(r"[+-]?(\d+([.,:/ T-]\d+)*|\.\d+)([eE][+-]?\d+)?")
"""A number, a date or a time."""
_SHOWN, _SHOWN_ROWS, _SHOWN_LETTERS = 4, 3, 20
"""Columns, rows and letters of a value that a message shows of a reading."""


class _Reading(NamedTuple):
    """How well a dialect fits: the share of records with the number of fields that most later ones have."""

    dialect: CsvDialect
    share: float
    width: int


def find_dialect(
    path: Path, lines: Sequence[str], given: GivenDialect, usual: GivenDialect | None
) -> tuple[CsvDialect, tuple[str, ...], int]:
    """Returns how a file is read, the fields of its header, and the number of lines before the first row of data.

    Names are c0, c1, ... if there is no header.

    Args:
        path: names the file in messages.
        lines: its beginning.
        given: what is said of this very file.
        usual: what is known of such files from a schema, which decides if several readings are possible; None if
            there is no schema, and the person has to.

    Raises:
        UserError: if there is nobody to decide; it shows both readings and their keys.
    """
    declared = re.fullmatch(r'"?sep=(.)"?[\r\n]*', lines[0])
    if declared and given.delimiter is None:
        given = given.replace(delimiter=declared[1])
    body = lines[given.skip or bool(declared) :]
    readings = _readings(body[:_MOST_LINES], body, given, usual or UNSAID)
    best = max(readings, key=lambda reading: (reading.share, reading.width))
    if usual is None and best.width < 2 and given.delimiter is None:
        # nothing in a file of one column may separate several
        shown = [list(records_of(iter(body[: _SHOWN_ROWS + 1]), each.dialect)) for each in readings]
        other = next((place for place, each in enumerate(shown) if each and len(each[0][2]) > 1), None)
        if other is not None:
            possible = []
            for dialect, rows in ((readings[other].dialect, shown[other]), (PLAIN_CSV, shown[0])):
                said = {"delimiter": dialect.delimiter} | dialect.model_dump(exclude_defaults=True)
                possible.append((said, "", rows[0][2], [fields for *_, fields in rows[1:]]))
            raise _ambiguous(path, "it seems to have one column", possible)
    records = list(records_of(iter(lines[:_MOST_LINES]), best.dialect))
    width = best.width or max((len(fields) for *_, fields in records), default=0)
    skip = _skipped(records, width, given, usual, bool(declared))
    first_line, last_line, first = next((each for each in records if each[0] > skip), (1, 0, []))
    later = [fields for line, _, fields in records if line > first_line and len(fields) == len(first)]
    dialect = best.dialect.replace(skip=skip)
    header = given.header if usual is None or given.header is not None else usual.header
    if usual is not None and given.header is None:  # a file beside a log without names may still have them
        header = header is not False or bool({name.strip() for name in first} & set(_placed(width)))
    if header is None:
        header = _has_header(path, lines[skip:], first, later, dialect)
    dialect = dialect.replace(header=header)
    return dialect, tuple(first) if header else _placed(width), last_line if header else skip


def escapes(lines: Sequence[str], dialect: CsvDialect) -> bool:
    """Tells whether these lines, some of which have a quote after a backslash, are read better with escapes."""
    escaped = dialect.replace(escape="\\")
    return _reading(lines, escaped).share > _reading(lines, dialect).share


def _placed(width: int) -> tuple[str, ...]:
    return tuple(f"c{place}" for place in range(width))


def _readings(
    sample: Sequence[str], body: Sequence[str], given: GivenDialect, usual: GivenDialect
) -> list[_Reading]:
    """Returns how well each dialect fits that is likely; of equal ones the first is the likeliest."""
    first = next((line for line in sample if line.strip()), "")
    common = [mark for mark in _COMMON if mark in first]
    fixed: dict[str, str] = {key: given.said[key] for key in _MARKS if key in given.said}
    readings: list[_Reading] = []

    def judge(*dialects: dict[str, Any]) -> bool:
        for one in dialects:
            dialect = CsvDialect(**one | fixed)
            if all(dialect != known.dialect for known in readings):
                readings.append(_reading(sample, dialect))
        return any(reading.share > 0.8 for reading in readings)

    def variants(said: dict[str, Any]) -> list[dict[str, Any]]:
        escapes = ("", "\\") if any("\\" in line for line in sample) else ("",)
        quotes = dict.fromkeys((said.get("quote", '"'), '"', ""))
        return [said, *(said | {"quote": quote, "escape": escape} for quote in quotes for escape in escapes)]

    kept: dict[str, str] = {key: usual.said[key] for key in _MARKS if key in usual.said}
    if kept:
        judge(kept)
    plain = len(common) == 1 and not any(mark in line for line in body for mark in "\"'\\#")
    if plain and judge({"delimiter": common[0]}) and readings[-1].share == 1.0:
        return readings
    for part in (body, body[len(body) // 4 :]):  # without lines before the header, if there are
        found = _sniffed(part, fixed)
        if found is not None and judge(*variants(found[0])):
            return readings
    for mark in dict.fromkeys([*_COMMON, *first, *sample[len(sample) // 2]]):
        if mark in _COMMON or (mark.isascii() and not mark.isalnum() and mark not in _WITHIN_WORDS):
            judge(*variants({"delimiter": mark}))
    return readings


def _sniffed(lines: Sequence[str], fixed: dict[str, str]) -> tuple[dict[str, str], bool] | None:
    """Returns what DuckDB finds, as fields of a CsvDialect, and whether it sees a header; None if nothing."""
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "threads": 1,
    }
    words = "".join(f", {_MARKS[key]}='{mark.replace(chr(39), 2 * chr(39))}'" for key, mark in fixed.items())
    with tempfile.NamedTemporaryFile(suffix=".csv") as file, duckdb.connect(config=settings) as connection:
        file.write("".join(line.rstrip("\r\n") + "\n" for line in lines).encode())
        file.flush()
        try:
            found = connection.execute(
                "select delimiter, quote, escape, hasheader from sniff_csv(?, ignore_errors=true, "
                f"sample_size=-1, compression='none'{words})",
                [file.name],
            ).fetchone()
        except duckdb.Error:
            return None
    assert found is not None
    delimiter, quote, escape, header = found
    marks = {"quote": quote if len(quote) == 1 else '"', "escape": escape if escape == "\\" else ""}
    return {"delimiter": delimiter, **marks}, bool(header)


def _reading(lines: Sequence[str], dialect: CsvDialect) -> _Reading:
    """Reads lines strictly. A field counts as misread if it holds a quote that only another dialect would leave
    there: with escapes, one that is not escaped; without, one after a backslash."""
    quote, escape = dialect.quote, dialect.escape
    if escape:
        pairs = re.compile(re.escape(escape) + r"[^\r\n]")
        lines = [pairs.sub("", line) for line in lines]

    def misread(field: str) -> bool:
        if quote:
            return (quote if escape else f"\\{quote}") in field
        return len(field) > 1 and field[0] == field[-1] == '"'

    rest, widths = iter(lines), list[int]()
    while True:
        try:
            for _, _, fields in records_of(rest, dialect, strict=True):
                widths.append(0 if any(map(misread, fields)) else len(fields))
            break
        except csv.Error:
            widths.append(0)
    known = [width for width in widths if width]
    later = Counter(known[len(known) // 2 :])  # lines before the header come early
    width = max(later, key=lambda each: (later[each], widths.count(each)), default=0)
    alike = widths.count(width) if width > 1 else 0
    if not quote:  # a quote or two that are never closed are damage
        alike = max(0, alike - 2 - len(widths) // 50)
    return _Reading(dialect, alike / max(1, len(widths)), width)


def _skipped(
    records: Sequence[tuple[int, int, list[str]]],
    width: int,
    given: GivenDialect,
    usual: GivenDialect | None,
    declared: bool,
) -> int:
    """Returns the number of lines before the header, or before the first row."""
    if given.skip is not None:
        return given.skip
    if usual is not None and usual.skip:
        after = [fields for line, _, fields in records if line > usual.skip]
        if after and len(after[0]) == width and not any(_like_data(after[0], after[1:])):
            return usual.skip
    later = [place for place, (_, _, fields) in enumerate(records) if len(fields) == width]
    place = next(iter(later[1:] if declared and later and later[0] == 0 else later), 0)
    fields = [each[2] for each in records]
    while fields[place][0].startswith("#") and not any(_like_data(fields[place + 1], fields[place + 2 :])):
        place += 1  # unless rows follow, so that it is the header
    if place > declared and len(fields[place - 1]) > 1:
        # a header that is shorter or longer than all rows: a later check reports it
        place -= any(_like_data(fields[place], fields[place + 1 :]))
    return records[place][0] - 1 if place else 0


def _like_data(first: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Returns how many fields of a record come again in their column, and how many others are numbers or times."""
    rows = [row for row in rows if len(row) == len(first) and list(row) != list(first)]
    columns = [set(column) for column in zip(*rows, strict=True)] or [set[str]()] * len(first)
    again = [value.strip() != "" and value in column for value, column in zip(first, columns, strict=True)]
    numbers = (_NUMBER.fullmatch(value.strip()) is not None for value in first)
    return sum(again), sum(number and not seen for number, seen in zip(numbers, again, strict=True))


def _has_header(
    path: Path, lines: Sequence[str], first: Sequence[str], rows: Sequence[Sequence[str]], dialect: CsvDialect
) -> bool:
    """Tells whether the first record holds names; numbers among them do, if the sniffer sees a header."""
    again, numbers = _like_data(first, rows)
    if not again and not numbers:
        return True
    if 2 * again <= sum(value.strip() != "" for value in first):
        found = _sniffed(lines, {key: getattr(dialect, key) for key in _MARKS})
        if found is not None and found[1]:
            return True
    whole = [row for row in (first, *rows) if len(row) == len(first)]
    columns = dict(zip(_placed(len(first)), zip(*whole, strict=True), strict=False))
    labels = (name for name in reversed(columns) if set(map(plain_label, columns[name])) == {0, 1})
    said = dialect.model_dump(exclude_defaults=True)
    as_row = said | {"header": False}, f" label={next(labels, '...')}", _placed(len(first)), [first, *rows]
    as_header = said | {"header": True}, "", first, rows
    raise _ambiguous(path, "the first line may be a header or a row", [as_row, as_header])


def _ambiguous(
    path: Path,
    why: str,
    readings: Sequence[tuple[dict[str, Any], str, Sequence[str], Sequence[Sequence[str]]]],
) -> UserError:
    text = [f"{path}: {why}. Say how it is read, with one of these:"]
    for said, more, names, rows in readings:
        keys = []
        for key, value in said.items():
            mark = str(value) if str(value).isprintable() else repr(value)[1:-1]
            yes_or_no = "yes" if value else "no"
            keys.append(shlex.quote(f"csv.{key}={yes_or_no if isinstance(value, bool) else mark}"))
        columns = []
        for place, name in enumerate(names):
            values = [row[place][:_SHOWN_LETTERS] if place < len(row) else "-" for row in rows[:_SHOWN_ROWS]]
            columns.append(f"{name[:_SHOWN_LETTERS]!r}: {', '.join(values)}")
        if len(columns) > _SHOWN + 1:
            columns = [*columns[:_SHOWN], "...", columns[-1]]
        text.append(f"  {' '.join(keys)}{more}\n      {'; '.join(columns)}")
    return UserError("\n".join(text))
