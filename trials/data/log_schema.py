"""LogSchema: what every column of a log is for, and how the rows are split.

It is inferred from a sample of the log (`trials.data.roles.infer`), written as `schema.yaml`
(`trials.data.schema_yaml`), edited by hand, and read back strictly. Pure values: no data.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dhen.errors import unknown_name
from dhen.schema import Growing, Ttl, node_names
from dhen.values import Value, parse

DecimalMark = Literal[".", ","]
POINT: DecimalMark = "."
StampFormat = Literal[
    "iso",
    "seconds",
    "milliseconds",
    "microseconds",
    "nanoseconds",
    "yymmddhh",
    "yyyymmdd",
    "yyyymmddhh",
    "yyyymmddhhmmss",
    "day_first",
    "month_first",
]
Cycle = Literal["hour_of_day", "day_of_week"]
CYCLES: tuple[Cycle, ...] = ("hour_of_day", "day_of_week")


class LabelColumn(Value):
    """The column that is predicted: exactly two values, no missing ones."""

    role: Literal["label"] = "label"
    """What the column is for."""
    positive: str | None = None
    """The value that counts as 1; null where it is obvious (1, true, yes, click ...)."""


class TableKind(Value):
    """What kind of embedding table a column has: one of fixed rows, or one that grows."""

    growing: Growing | None = None
    """A table in which values get rows while it trains, of at most `capacity` rows; null: a row for each value
    from the start, as `min_count` and `hash_buckets` say."""


FIXED = TableKind()
MIN_COUNT = 2


def _fixed_or_growing(column: CategoricalColumn | MultiHotColumn) -> None:
    """Checks that nothing is said of fixed rows where a table grows."""
    if column.table.growing is None:
        return
    if column.hash_buckets not in ("auto", None):
        raise ValueError(
            f"a growing table is not hashed into buckets (hash_buckets: {column.hash_buckets}): give its "
            "`capacity` alone, or no `table`"
        )
    if column.min_count != MIN_COUNT:
        raise ValueError(
            f"a growing table has no min_count (received {column.min_count}): its `admit_after` says how often a "
            "value occurs before it has a row"
        )


class CategoricalColumn(Value):
    """A column with one value per example, looked up in an embedding table."""

    role: Literal["categorical"] = "categorical"
    """What the column is for."""
    min_count: int = Field(default=MIN_COUNT, ge=1)
    """A value seen fewer times in the training rows shares one id (out of vocabulary) with unseen ones."""
    hash_buckets: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """How values become rows of the table: a number N hashes them into N rows; null keeps a vocabulary of any
    size; auto keeps a vocabulary unless more than 5 million values reach `min_count`, and then hashes into
    4,194,304 rows."""
    table: TableKind = Field(default=FIXED, exclude_if=lambda table: table == FIXED)
    """Kind of the table, such as `{growing: {capacity: 1000000, admit_after: 2, evict: lfu, ttl: null}}`; fixed
    rows where left out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _fixed_or_growing(self)
        return self


class MultiHotColumn(Value):
    """A column with any number of values per example; their embeddings are averaged."""

    role: Literal["multi_hot"] = "multi_hot"
    """What the column is for."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the values of a text column; null for a column of lists (Parquet)."""
    min_count: int = Field(default=MIN_COUNT, ge=1)
    """Least count of a value, as for a categorical column; every value of a bag counts."""
    hash_buckets: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """How values become rows of the table, as for a categorical column."""
    table: TableKind = Field(default=FIXED, exclude_if=lambda table: table == FIXED)
    """Kind of the table, as for a categorical column; left out: fixed rows."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _fixed_or_growing(self)
        return self


class NumericColumn(Value):
    """A column of numbers, standardised with the mean and deviation of the training rows."""

    role: Literal["numeric"] = "numeric"
    """What the column is for."""
    transform: Literal["standard", "log"] = "standard"
    """standard, or log, which takes sign(x) log(1 + |x|) first: for counts and amounts with a heavy tail."""
    buckets: Annotated[int, Field(ge=2)] | None = None
    """Largest number of buckets, which are quantiles of the training rows, for a further embedding table
    `COLUMN__bucket`; null: no such table."""
    decimal: DecimalMark = Field(default=POINT, exclude_if=lambda mark: mark == POINT)
    """Mark before the decimals of a number that is written as text; with a comma the point may group thousands:
    1.234,50."""


class TimestampColumn(Value):
    """The column of the time at which the example happened (UTC). Splits rows by time; no model input but its
    derived tables."""

    role: Literal["timestamp"] = "timestamp"
    """What the column is for."""
    format: StampFormat = "iso"
    """How the time is written: 31.12.2026 and 31/12/2026 17:05:09 are day_first, 12/31/2026 5:05 PM is
    month_first. Columns that Parquet types as time stamps need none."""
    derive: tuple[Cycle, ...] = CYCLES
    """Categorical tables made from it; a table is left out where the training rows do not span its cycle."""


class WeightColumn(Value):
    """The column of the example's weight in the loss and in every metric; not negative."""

    role: Literal["weight"] = "weight"
    """What the column is for."""


class OracleColumn(Value):
    """The column of the true probability in a generated log: kept beside the label, never a model input."""

    role: Literal["oracle"] = "oracle"
    """What the column is for."""


class SplitColumn(Value):
    """A column that says whether the row is for training, validation or test, in the log's own words, and is never
    a model input. `split` says which of its values are validation and test."""

    role: Literal["split"] = "split"
    """What the column is for."""


class IgnoredColumn(Value):
    """A column that is not used."""

    role: Literal["ignore"] = "ignore"
    """What the column is for."""


Column = (
    LabelColumn
    | CategoricalColumn
    | MultiHotColumn
    | NumericColumn
    | TimestampColumn
    | WeightColumn
    | OracleColumn
    | SplitColumn
    | IgnoredColumn
)
ROLES: dict[str, type[Column]] = {
    "label": LabelColumn,
    "categorical": CategoricalColumn,
    "multi_hot": MultiHotColumn,
    "numeric": NumericColumn,
    "timestamp": TimestampColumn,
    "weight": WeightColumn,
    "oracle": OracleColumn,
    "split": SplitColumn,
    "ignore": IgnoredColumn,
}
TableColumn = CategoricalColumn | MultiHotColumn


SPLITS = ("train", "validation", "test")
"""The parts of a log, in the order in which they are numbered (0, 1, 2) while rows are dealt out."""


SplitBy = Literal["timestamp", "order", "files", "column"]
SplitPart = float | tuple[str, ...]
"""A fraction of the rows, or names of files or values of a column."""


def _one_form(value: Any) -> Any:
    """Returns a part of a split as one of its forms. Folds are often numbers: `[3]` is the value 3 of a column."""
    if isinstance(value, (list, tuple)):
        if not all(isinstance(name, str) or type(name) is int for name in value):
            raise ValueError(
                f"a list holds names of files or values of a column, a fraction stands alone, e.g. 0.1; "
                f"received {list(value)}"
            )
        return tuple(map(str, value))
    if isinstance(value, str):
        raise ValueError(f"names stand in a list, also a single one: [{value}]")
    return value


class SplitRule(Value):
    """A rule that says which rows are train, validation and test. Fractions let no later row teach about an
    earlier one."""

    by: SplitBy = "order"
    """timestamp: validation is later than train and test later than validation, and rows with equal stamps
    stay together; order: the same by position in the log; files: by file name; column: by the values of the
    column with the role split."""
    validation: SplitPart = 0.1
    """Fraction of the rows for validation; with `by: files` a list of file names, with `by: column` of values.
    The name of a file in a folder that is the log is its path in there (`day1/part-0.parquet`). With
    `by: timestamp` or `by: order`, one of validation and test may be a list too, of values where a column has the
    role split, else of file names; the fraction is then of the other rows."""
    test: SplitPart = 0.1
    """Fraction of the rows for test, or a list, as for validation. Rows in neither are training rows."""

    _one_form = field_validator("validation", "test", mode="before")(_one_form)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [part for part in (self.validation, self.test) if isinstance(part, tuple)]
        if not all(names):
            raise ValueError("a list of files or values is empty; name one, or give a fraction such as 0.1")
        if set(self.names("validation")) & set(self.names("test")):
            raise ValueError(
                f"a {'value' if self.by == 'column' else 'file'} is both in validation and in test"
            )
        if self.by in ("files", "column"):
            if len(names) < 2:
                kinds = "values" if self.by == "column" else "file names"
                raise ValueError(
                    f"with `by: {self.by}`, validation and test are both lists of {kinds}; for a list beside a "
                    "fraction give `by: timestamp` or `by: order`, by which it is cut from the other rows"
                )
        elif len(names) == 2:
            raise ValueError(
                f"validation and test are both lists, so that nothing is cut by {self.by}: give `by: files`, or "
                "`by: column` where they are values of a column"
            )
        elif not all(0.0 < part < 1.0 for part in self._given_fractions) or sum(self.fractions) >= 1:
            given = ", ".join(map(str, self._given_fractions))
            raise ValueError(
                f"validation and test are fractions above 0 that leave rows for training, e.g. 0.1 "
                f"(received {given})"
            )
        return self

    @property
    def _given_fractions(self) -> list[float]:
        return [part for part in (self.validation, self.test) if isinstance(part, float)]

    @property
    def fractions(self) -> tuple[float, float]:
        """Fractions of validation and test; 0 where a list names the rows."""
        validation = self.validation if isinstance(self.validation, float) else 0.0
        return validation, self.test if isinstance(self.test, float) else 0.0

    def names(self, split: Literal["validation", "test"]) -> tuple[str, ...]:
        """Returns the files or values that make up a split; none where it is a fraction."""
        part = self.validation if split == "validation" else self.test
        return part if isinstance(part, tuple) else ()


class GivenSplit(Value):
    """What is said of the split beside a schema; what is not said is as the schema has it."""

    by: SplitBy | None = None
    """How rows are split, as in the [schema](schema.md): timestamp, order, files or column. Null: by files where
    both parts are lists (by column where one has the role split), else as the schema has it, which is by
    timestamp where the log has one, else by order."""
    validation: SplitPart | None = None
    """Fraction of the rows for validation, such as 0.15, or a list of names of files, or of values of the column
    that holds the split. Null: as the schema has it."""
    test: SplitPart | None = None
    """Fraction of the rows for test, or a list, such as [test.csv.gz]. Null: as the schema has it."""

    _one_form = field_validator("validation", "test", mode="before")(_one_form)

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


class GivenGrowing(Value):
    """Which tables grow, said beside a schema; capacity and columns stand together."""

    capacity: int | None = Field(default=None, gt=0)
    """Largest number of ids of each growing table that have a row at the same time, such as 1000000. Null: tables
    are as the [schema](schema.md) has them."""
    columns: tuple[str, ...] | None = None
    """Names of the columns whose tables grow, in a list; categorical or multi-hot ones."""
    admit_after: int = Field(default=2, ge=1, le=255)
    """Number of occurrences of an id from which on it has a row of its own, as in the schema."""
    evict: Literal["lfu", "lru"] = "lfu"
    """Ids that give way where a table is full, as in the schema."""
    ttl: Ttl | None = None
    """Time without an occurrence after which an id gives its row back, as in the schema: `3d`, `6h` or `30m` by
    the log's time stamps, which needs `training.order=log`, or a number of training steps; null: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self != GivenGrowing.model_construct() and (self.capacity is None or not self.columns):
            raise ValueError(
                "growing tables need a capacity, e.g. 1000000, and columns, e.g. [user_id, item_id]"
            )
        return self

    def applied_to(self, schema: LogSchema) -> LogSchema:
        """Returns a schema whose tables grow as this says.

        Raises:
            UserError: for a column that has no table, or a `ttl` in the time of a log without time stamps.
        """
        if self.capacity is None or self.columns is None:
            return schema
        for name in self.columns:
            if name not in schema.tables:
                raise unknown_name("categorical or multi_hot column", name, schema.tables)
        rule = Growing(capacity=self.capacity, admit_after=self.admit_after, evict=self.evict, ttl=self.ttl)
        kept = {"table": TableKind(growing=rule), "min_count": MIN_COUNT, "hash_buckets": "auto"}
        columns = {name: schema.tables[name].replace(**kept) for name in self.columns}
        data = {name: column.to_dict() for name, column in {**schema.columns, **columns}.items()}
        return parse(LogSchema, schema.to_dict() | {"columns": data}, "growing")


class LogSchema(Value):
    """The roles of all columns of a log, in its order; columns it does not name are not used."""

    columns: dict[str, Annotated[Column, Field(discriminator="role")]]
    """Role and settings of each column, by its name."""
    split: SplitRule = SplitRule()
    """Which rows are train, validation and test."""
    negative_sampling_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """The fraction of negatives that were kept when the log was written; 1 when all were."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for role in ("label", "timestamp", "weight", "oracle", "split"):
            names = [name for name, column in self.columns.items() if column.role == role]
            if len(names) > 1:
                raise ValueError(
                    f"{len(names)} columns have the role {role}, at most one may: {', '.join(names)}"
                )
        if self.label is None:
            raise ValueError("no column has the role label; give one `role: label`")
        if self.split.by == "timestamp" and self.timestamp is None:
            raise ValueError("split by timestamp needs a column with the role timestamp; or use `by: order`")
        if self.split.by == "column" and self.split_column is None:
            raise ValueError(
                "split by column needs a column with the role split; or use `by: timestamp` or `by: order`"
            )
        for name in self.tables:
            growing = self.growing(name)
            if growing is not None and growing.ttl_milliseconds and self.timestamp is None:
                raise ValueError(
                    f"the ttl of {name}, {growing.ttl}, is of the log's time, and no column has the role "
                    "timestamp: give one the role, or the ttl as a number of training steps"
                )
        if not self.tables and not self.numeric:
            raise ValueError("no column is a feature; give one the role categorical, multi_hot or numeric")
        self._check_derived_names()
        return self

    def _check_derived_names(self) -> None:
        clashes = [cycle for cycle in self.cycles if cycle in self.tables]
        if clashes:
            raise ValueError(
                f"the log has a column {clashes[0]!r} itself: take it out of the time stamp's `derive`"
            )
        for name in self.numeric:
            if f"{name}__missing" in self.numeric:
                raise ValueError(
                    f"{name}__missing is the name of {name}'s missing-value input: ignore one of them"
                )
        for table, name in self.bucketed.items():
            for derived in (table, *node_names(table)):
                if derived in self.tables:
                    raise ValueError(
                        f"{derived} is the name of a table of {name}'s buckets: ignore it, or give {name} no "
                        "`buckets`"
                    )

    def _only(self, role: str) -> str | None:
        return next((name for name, column in self.columns.items() if column.role == role), None)

    @property
    def label(self) -> str:
        """Name of the label column."""
        return self._only("label")  # type: ignore[return-value]  # checked at birth

    @property
    def timestamp(self) -> str | None:
        """Name of the time stamp column."""
        return self._only("timestamp")

    @property
    def weight(self) -> str | None:
        """Name of the example weight column."""
        return self._only("weight")

    @property
    def oracle(self) -> str | None:
        """Name of the column of true probabilities."""
        return self._only("oracle")

    @property
    def split_column(self) -> str | None:
        """Name of the column whose values `split` lists; None where it lists files, or nothing."""
        lists = self.split.names("validation") or self.split.names("test")
        return self._only("split") if lists and self.split.by != "files" else None

    @property
    def splits_by_file(self) -> bool:
        """Whether `split` lists files, so that their names decide about rows."""
        lists = self.split.names("validation") or self.split.names("test")
        return bool(lists) and self.split_column is None

    @property
    def cycles(self) -> tuple[Cycle, ...]:
        """Tables derived from the time stamp."""
        column = self.columns.get(self.timestamp or "")
        return column.derive if isinstance(column, TimestampColumn) else ()

    @cached_property
    def categorical(self) -> dict[str, CategoricalColumn]:
        """Categorical columns by name."""
        return {
            name: column for name, column in self.columns.items() if isinstance(column, CategoricalColumn)
        }

    @cached_property
    def multi_hot(self) -> dict[str, MultiHotColumn]:
        """Multi-hot columns by name."""
        return {name: column for name, column in self.columns.items() if isinstance(column, MultiHotColumn)}

    @cached_property
    def tables(self) -> dict[str, TableColumn]:
        """Categorical columns, then multi-hot ones."""
        return {**self.categorical, **self.multi_hot}

    def growing(self, name: str) -> Growing | None:
        """Returns how the table of a column grows; None for one of fixed rows."""
        return self.tables[name].table.growing

    @cached_property
    def numeric(self) -> dict[str, NumericColumn]:
        """Numeric columns by name."""
        return {name: column for name, column in self.columns.items() if isinstance(column, NumericColumn)}

    @cached_property
    def bucketed(self) -> dict[str, str]:
        """Tables derived from numeric columns, each with its column."""
        return {f"{name}__bucket": name for name, column in self.numeric.items() if column.buckets}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that a model needs, without the label: what a raw file must hold to be scored."""
        stamp = (self.timestamp,) if self.timestamp and self.cycles else ()
        return tuple(
            name for name in self.columns if name in self.tables or name in self.numeric or name in stamp
        )

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that are read: not ignored ones, nor one of splits that `split` has no use for."""
        return tuple(
            name
            for name, column in self.columns.items()
            if column.role != "ignore" and (column.role != "split" or name == self.split_column)
        )
