"""`schema.yaml`: a LogSchema written for people to edit, and read back strictly.

One line per column, with what was seen in the sample as a comment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from dhen.errors import UserError, unknown_name
from dhen.values import YamlDumper, load_yaml, parse
from trials.data.log_schema import ROLES, Column, LogSchema
from trials.records.study_record import ColumnFinding

_HEAD = """\
# What every column of the log is for. Edit, then prepare the log again with this file.
#
# role: label         what is predicted; `positive` names the value that counts as 1, or `where: '>=4'` compares;
#                     share: count (clicks among as many as `weight` has) or rate (a click rate, a probability)
#       categorical   an embedding table; values seen fewer than min_count times in the training rows share an id;
#                     hash_buckets: null (a vocabulary), a number, or auto (hashed above 5 million values);
#                     or table: {growing: {capacity: 1000000}}, whose values get rows while it trains
#       multi_hot     the same with any number of values per example, between `separator`s
#       numeric       transform: standard, or log for a heavy tail; buckets: a table besides, of so many
#                     quantiles of the training rows, or null; decimal: ',' where numbers are written as 1.234,50
#       timestamp     splits rows by time; format: iso, seconds, milliseconds, microseconds, nanoseconds,
#                     yymmddhh, yyyymmdd, yyyymmddhh, yyyymmddhhmmss, day_first (31.12.2026 17:05) or month_first
#                     (12/31/2026 5:05 PM); derive: tables made of it
#       weight        weight of the example in the loss and all metrics
#       oracle        the true probability of a generated log, never an input
#       split         whether the row is for training, validation or test; `split` below lists its values
#       ignore        not used
"""
_SPLIT_HEAD = """\
# by: timestamp (validation later than train, test later than validation), order (position in the log), random,
# files (validation and test are lists of file names), or column (lists of values of the column with role: split);
# auto: order or random, by what is seen of all rows.
# With the first three one of the two may be a list, too: {by: order, validation: 0.1, test: [test.csv]}
"""
_CSV_HEAD = """\
# how the files are written, if not with commas, double quotes and a header; keys: delimiter, quote, escape, skip
# (lines before the header), header (false: columns are c0, c1, ...)
"""
_RATE_HEAD = "# the fraction of negatives that were kept in the log; 1.0 if none was dropped\n"


def schema_to_yaml(schema: LogSchema, findings: Sequence[ColumnFinding] = ()) -> str:
    """Returns the text of a `schema.yaml`, with what was found of columns as comments."""
    data = schema.to_dict()
    notes = {
        each.name: f"{each.why}; {each.distinct:,} values"
        + (f", {100 * each.missing:.2g} % missing" if each.missing else "")
        for each in findings
    }
    entries = []
    for name, column in data["columns"].items():  # `  name: {role: ...}  # note`
        text = _yaml({name: None}).removesuffix("null\n") + _flow(column)
        note = " ".join("".join(c if c.isprintable() else " " for c in notes.get(name, "")).split())
        if note and "\n" not in text:
            entries.append(f"  {text}  # {note}\n")
        else:  # the note goes above an entry of several lines
            entries.append(indent(f"# {note}\n{text}" if note else text, "  ") + "\n")
    csv = f"{_CSV_HEAD}csv: {_flow(schema.csv.said)}\n" if "csv" in data else ""
    return (
        f"{_HEAD}columns:\n{''.join(entries)}\n"
        f"{_SPLIT_HEAD}split: {_flow(data['split'])}\n"
        f"{_RATE_HEAD}negative_sampling_rate: {schema.negative_sampling_rate}\n{csv}"
    )


def _flow(data: dict[str, Any]) -> str:
    """Returns plain data on one line."""
    return _yaml(data, default_flow_style=True).rstrip("\n")


def _yaml(data: dict[str, Any], **style: Any) -> str:
    """Returns YAML without line breaks of its own; what cannot be printed is escaped, as `repr` does."""
    printable = "\\" not in repr(data)
    return str(
        yaml.dump(data, Dumper=YamlDumper, sort_keys=False, allow_unicode=printable, width=2**31, **style)
    )


def read_schema(path: Path) -> LogSchema:
    """Reads a `schema.yaml`.

    Raises:
        UserError: for a missing file, an unknown key or role (with the nearest), or a value that is not allowed.
    """
    return parse_schema(load_yaml(path), str(path))


def parse_schema(data: object, source: str) -> LogSchema:
    """Makes a LogSchema from plain data; errors name `source`, the column and the key."""
    if isinstance(data, dict) and isinstance(data.get("columns"), dict):
        columns = {
            str(name): parse_column(column, f"{source}: column {name!r}")
            for name, column in data["columns"].items()
        }
        data = {**data, "columns": columns}
    return parse(LogSchema, data, source)


def parse_column(data: object, source: str) -> Column:
    """Makes a column from plain data.

    Raises:
        UserError: for an unknown role, or a key that the role does not have.
    """
    if not isinstance(data, dict) or "role" not in data:
        raise UserError(
            f"{source}: expected {{role: ...}} with one of {', '.join(ROLES)}, received {data!r}."
        )
    if data["role"] not in ROLES:
        raise UserError(f"{source}: {unknown_name('role', str(data['role']), ROLES)}")
    return parse(ROLES[data["role"]], data, source)


def with_roles(schema: LogSchema, given: Mapping[str, str | dict[str, Any]]) -> LogSchema:
    """Returns a schema with other roles, or keys, of some columns.

    Raises:
        UserError: for a column that the schema has not, and keys that a role does not have.
    """
    columns = dict(schema.columns)
    for name, keys in given.items():
        if name not in columns:
            raise UserError(f"columns.{name}: {unknown_name('column', name, columns)}")
        data = {"role": keys} if isinstance(keys, str) else dict(keys)
        if data.get("role", columns[name].role) == columns[name].role:
            data = columns[name].to_dict() | data
        columns[name] = parse_column(data, f"columns.{name}")
    data = {name: column.to_dict() for name, column in columns.items()}
    return parse(LogSchema, schema.to_dict() | {"columns": data}, "columns")


def check_columns(schema: LogSchema, present: Sequence[str], source: str) -> None:
    """Raises a UserError when the schema names a column that the log lacks."""
    absent = [name for name in schema.columns if name not in present]
    if absent:
        raise UserError(f"{source}: {unknown_name('column in the schema', absent[0], present)}")
