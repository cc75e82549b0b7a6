"""The bodies of requests, in the forms that MLflow's scoring protocol has, as raw rows.

`dataframe_records` and `instances` are lists of rows, `dataframe_split` has `columns` and `data`, `inputs` has a
list of values for each column; `text/csv` is read as files are.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv

from dhen.errors import UserError
from search.bundles.scorer import record_batch
from trials.data.log_schema import LogSchema, MultiHotColumn

JSON, CSV = "application/json", "text/csv"
PARAMS = "params"
MOST_NAMED = 10
"""Keys of a body that a message names, at most."""
SINGLE = {str, int, float, bool, type(None)}
"""Types of single values in JSON."""
Table = Mapping[str, Sequence[Any]]
"""Values of all rows, by column."""


class ContentTypeError(UserError):
    """The body is in a form that is not read here."""


def rows_of(body: bytes, content_type: str, schema: LogSchema) -> pa.RecordBatch | None:
    """Returns the inputs of a log's rows that a body has; None if it has no rows.

    Args:
        body: the body.
        content_type: the header that names its form.
        schema: the log's columns, of which the inputs are read; others are ignored.

    Raises:
        ContentTypeError: for another form than JSON or CSV in UTF-8.
        UserError: for a body that holds no rows in one of the forms, and for a value that is a list or an object
            if its column's role has none.
    """
    form, *parameters = [part.strip().lower() for part in content_type.split(";")]
    if any(parameter not in ("", "charset=utf-8", 'charset="utf-8"') for parameter in parameters):
        raise ContentTypeError(
            f"Content-Type is {content_type!r}: bodies are UTF-8, without other parameters."
        )
    if form not in (JSON, CSV):
        received = repr(content_type) if content_type else "missing"
        raise ContentTypeError(f"Content-Type is {received}: send {JSON} or {CSV}.")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"the body is no UTF-8: {error}.") from None
    return _csv(text, schema) if form == CSV else _json(text, schema)


def _json(text: str, schema: LogSchema) -> pa.RecordBatch | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise UserError(f"the body is no JSON: {error}.") from None
    given = sorted(set(data) & set(FORMS)) if isinstance(data, dict) else []
    if len(given) != 1:
        raise UserError(
            f"expected a JSON object with one of {', '.join(FORMS)}, received {_kind(data)}"
            f"{' with ' + (', '.join(sorted(data)[:MOST_NAMED]) or 'no key') if isinstance(data, dict) else ''}."
        )
    (name,) = given
    unknown = sorted(set(data) - {name, PARAMS})
    if unknown or data.get(PARAMS):
        raise UserError(
            f"beside {name} stands {', '.join(unknown) or PARAMS}, which this model does not take."
        )
    table, rows = FORMS[name](data[name], name, schema.inputs)
    if not rows:
        return None
    if not table:
        raise UserError(
            f"{name}: {rows} rows without a column of the model, which has {', '.join(schema.inputs)}."
        )
    return record_batch({column: _checked(column, values, schema) for column, values in table.items()})


def _checked(name: str, values: Sequence[Any], schema: LogSchema) -> Sequence[Any]:
    """Returns a column's values, lists throughout if some are; what its role does not allow is refused."""
    column, kinds, wanted = schema.columns[name], set(map(type, values)), "single value"
    good = [type(value) in SINGLE for value in values] if kinds - SINGLE else []
    if isinstance(column, MultiHotColumn):
        separator, wanted = column.separator, "list of values"
        if separator is not None and list in kinds:
            values = [value.split(separator) if isinstance(value, str) else value for value in values]
        allowed = {type(None)} if separator is None else {type(None), str}
        wanted += "" if separator is None else " or text"
        good = [
            type(value) in allowed or (isinstance(value, list) and set(map(type, value)) <= SINGLE)
            for value in values
        ]
    if not all(good):
        row = good.index(False)
        raise UserError(f"row {row + 1}: column {name!r} holds {values[row]!r}, which is no {wanted}.")
    return values


def _records(rows: Any, name: str, inputs: Sequence[str]) -> tuple[Table, int]:
    if not isinstance(rows, list):
        raise UserError(f"{name}: expected a list of rows, received {_kind(rows)}.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(
                f"{name}, row {number}: expected an object with a value for each column, received {_kind(row)}."
            )
    present = [column for column in inputs if any(column in row for row in rows)]
    return {column: [row.get(column) for row in rows] for column in present}, len(rows)


def _split(table: Any, name: str, inputs: Sequence[str]) -> tuple[Table, int]:
    if not isinstance(table, dict) or not {"columns", "data"} <= set(table):
        raise UserError(f"{name}: expected an object with columns and data, received {_kind(table)}.")
    names, rows = table["columns"], table["data"]
    if not _is_names(names) or not isinstance(rows, list):
        raise UserError(f"{name}: columns is a list of different names, and data a list of rows.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, list) or len(row) != len(names):
            found = f"{len(row)} values" if isinstance(row, list) else _kind(row)
            raise UserError(
                f"{name}, row {number}: expected a list of {len(names)} values, received {found}."
            )
    places = {column: place for place, column in enumerate(names)}
    present = [column for column in inputs if column in places]
    return {column: [row[places[column]] for row in rows] for column in present}, len(rows)


def _inputs(table: Any, name: str, inputs: Sequence[str]) -> tuple[Table, int]:
    if not isinstance(table, dict) or not all(isinstance(values, list) for values in table.values()):
        raise UserError(
            f"{name}: expected an object with a list of values for each column, received {_kind(table)}."
        )
    lengths = {column: len(values) for column, values in table.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{name}: the columns have different numbers of values: {lengths}.")
    return {column: table[column] for column in inputs if column in table}, max(lengths.values(), default=0)


def _is_names(names: Any) -> bool:
    return (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names)
    )


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


Form = Callable[[Any, str, Sequence[str]], tuple[Table, int]]
"""A function that returns those of a model's columns that rows have, and how many rows there are. Other columns
are never built: each row may name another one."""
FORMS: dict[str, Form] = {
    "dataframe_records": _records,
    "dataframe_split": _split,
    "instances": _records,
    "inputs": _inputs,
}
"""The forms of rows in JSON, by the key that they stand under."""


def _csv(text: str, schema: LogSchema) -> pa.RecordBatch | None:
    """Returns the columns as text; what stands for a missing value is that of files."""
    try:
        names = next(csv.reader(io.StringIO(text)), None)
    except csv.Error as error:
        raise UserError(f"the body is no CSV: {error}.") from None
    if not names or not _is_names(names):
        raise UserError("the body has no line of different column names, with which CSV begins.")
    present = [name for name in schema.inputs if name in names]
    bad: list[pacsv.InvalidRow] = []

    def on_bad(row: pacsv.InvalidRow) -> str:
        bad.append(row)
        return "error"

    parse = pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=on_bad)
    convert = pacsv.ConvertOptions(
        column_types=dict.fromkeys(present, pa.string()),
        include_columns=present,
        null_values=list(schema.marks),
        strings_can_be_null=True,
    )
    try:
        # one thread: only then does the parser know the number of a row
        read = pacsv.ReadOptions(use_threads=False)
        table = pacsv.read_csv(io.BytesIO(text.encode()), read, parse, convert)
    except pa.ArrowException as error:
        if bad:
            row = bad[0]
            raise UserError(
                f"row {row.number - 1}: expected {row.expected_columns} fields, found {row.actual_columns}."
            ) from None
        raise UserError(f"the body is no CSV: {error}.") from None
    return table.combine_chunks().to_batches()[0] if table.num_rows else None
