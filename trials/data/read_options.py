"""ReadOptions: what a person says of how a log is read, beside its schema.

Keys of a study and of every command that reads a log; what is not said is inferred, or is as the schema has
it.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dhen.errors import UserError, unknown_name
from dhen.schema import Growing, Ttl
from dhen.values import Value, milliseconds_of, parse
from trials.data.log_schema import (
    MIN_COUNT,
    UNSAID,
    GivenDialect,
    LogSchema,
    SplitBy,
    SplitPart,
    TableKind,
    one_form,
)


class GivenSplit(Value):
    """What is said of the split beside a schema; what is not said is as the schema has it."""

    by: SplitBy | None = None
    """How rows are split, as in the [schema](schema.md): timestamp, order, random, auto, files or column. Null: by
    files if both parts are lists (by column if one has the role split), else as the schema has it, which is auto
    if it was inferred and the log has no time stamps."""
    validation: SplitPart | None = None
    """Fraction of the rows for validation, such as 0.15, or a list of names of files, or of values of the column
    that holds the split. Null: as the schema has it."""
    test: SplitPart | None = None
    """Fraction of the rows for test, or a list, such as [test.csv.gz]. Null: as the schema has it."""

    _one_form = field_validator("validation", "test", mode="before")(one_form)

    def rule(self, schema: LogSchema) -> dict[str, Any]:
        """Returns the keys of the SplitRule that this and a schema make."""
        given = {key: value for key, value in self.to_dict().items() if value is not None}
        rule = schema.split.to_dict() | given
        both = all(isinstance(rule[part], (list, tuple)) for part in ("validation", "test"))
        if "by" not in given and both != (rule["by"] in ("files", "column")):
            by_time = "timestamp" if schema.timestamp else "order"
            by_names = "column" if any(one.role == "split" for one in schema.columns.values()) else "files"
            rule["by"] = by_names if both else by_time
        return rule


NEEDED = "growing tables need a capacity, e.g. 1000000, and columns, e.g. [user_id, item_id]"


class GivenGrowing(Value):
    """Which tables grow, said beside a schema or a bundle; columns and all else stand together."""

    capacity: int | None = Field(default=None, gt=0)
    """Largest number of ids of each growing table that have a row at the same time, such as 1000000. Null: tables
    are as the [schema](schema.md) has them."""
    columns: tuple[str, ...] | None = None
    """Names of the columns whose tables grow, in a list; categorical or multi-hot ones. `train --from-weights`
    makes tables of other columns static, `[]` all, and needs no capacity."""
    admit_after: int = Field(default=2, ge=1, le=255)
    """Number of occurrences of an id from which on it has a row of its own, as in the schema."""
    evict: Literal["lfu", "lru"] = "lfu"
    """Ids that give way if a table is full, as in the schema."""
    ttl: Ttl | None = None
    """Time without an occurrence after which an id gives its row back, as in the schema: `3d`, `6h` or `30m` by
    the log's time stamps, which needs `training.order=log`, or a number of training steps; null: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.columns and self != GivenGrowing.model_construct(columns=self.columns):
            raise ValueError(NEEDED)
        return self

    def applied_to(self, schema: LogSchema) -> LogSchema:
        """Returns a schema whose tables grow as this says.

        Raises:
            UserError: for a column that has no table, no columns or no capacity, or a `ttl` in the time of a log
                without time stamps.
        """
        if self.columns is None:
            return schema
        if self.capacity is None or not self.columns:
            raise UserError(f"growing: {NEEDED}.")
        for name in self.columns:
            if name not in schema.tables:
                raise unknown_name("categorical or multi_hot column", name, schema.tables)
        rule = Growing(capacity=self.capacity, admit_after=self.admit_after, evict=self.evict, ttl=self.ttl)
        kept = {"table": TableKind(growing=rule), "min_count": MIN_COUNT, "hash_buckets": "auto"}
        columns = {name: schema.tables[name].replace(**kept) for name in self.columns}
        data = {name: column.to_dict() for name, column in {**schema.columns, **columns}.items()}
        return parse(LogSchema, schema.to_dict() | {"columns": data}, "growing")


class ReadOptions(Value):
    """How a log is read, as far as a person says it."""

    format: str | None = None
    """Format of the files: csv, tsv, parquet, criteo or avazu; detected if not given."""
    csv: GivenDialect = UNSAID
    """How text files are written, if it is not found out rightly."""
    label: str | None = None
    """The label: a column of two values, a comparison (`rating>=4`, `status==delivered`), clicks among impressions
    (`clicks/impressions`), or a rate or probability from 0 to 1. Looked for by name if not given."""
    weight: str | None = None
    """Name of the column of the example's weight, such as the impressions that a rate is of; if not given, one
    that is called example_weight or sample_weight."""
    split: GivenSplit = GivenSplit()
    """Which rows are train, validation and test, if not as the schema has it."""
    columns: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    """Roles of columns, if not as found: `columns.NAME=ROLE`, such as `columns.weight=weight` or
    `columns.dwell_ms=ignore`; or keys of a column as the [schema](schema.md) has them, such as
    `columns.price.thousands=","`."""
    growing: GivenGrowing = GivenGrowing()
    """Which tables grow while they train (hash tables of embeddings), if not as the schema has it."""
    skip_bad_rows: bool = False
    """Whether rows that cannot be read are left out and counted; otherwise the first one ends the command."""


READ_AS_FOUND = ReadOptions()
"""Nothing is said: all is inferred, or as the schema has it."""


# The length of the periods that a log is cut into: a time, or a number of rows.

DAY = "1d"
"""Length of a period if none is given."""


def parse_length(text: str) -> tuple[int, int]:
    """Returns the milliseconds of `1d`, `6h` or `30m`, and the number of rows of `50000`; one of the two is 0.

    Raises:
        UserError: for anything else.
    """
    rows = int(text) if re.fullmatch(r"\s*[0-9]+\s*", text) else 0
    milliseconds = milliseconds_of(text) or 0
    if not rows and not milliseconds:
        raise UserError(
            f"period={text}: expected a time such as 1d, 6h or 30m, or a number of rows such as 50000."
        )
    return milliseconds, rows
