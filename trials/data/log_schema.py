"""LogSchema: what every column of a log is for, and how the rows are split.

It is inferred from a sample of the log (`trials.data.roles.infer`), written as `schema.yaml`
(`trials.data.schema_yaml`), edited by hand, and read back strictly. Pure values: no data.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from dhen.schema import Growing, node_names
from dhen.values import Value, omitted

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
    "month_name",
]
COMPARISON = re.compile(r"(>=|<=|!=|==|>|<)\s*(.*\S)")
"""A label's rule: an operator and what values are compared with."""
PAIR_WEIGHT = "\0weight"
"""Column of typed batches that has the weights of a log whose rows become two each; no file has such a name."""
Cycle = Literal["hour_of_day", "day_of_week"]
CYCLES: tuple[Cycle, ...] = ("hour_of_day", "day_of_week")


MISSING_MARKS = (
    *("", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "-NaN", "-nan"),
    *("NULL", "Null", "null", "(null)", "None", "none", "nil"),
    *("?", "\\N", "#N/A", "#NA", "#N/A N/A", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
    *("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!"),
)
"""What pandas, R, SPSS, spreadsheets, databases and C write for a missing value, in any column."""


class WrittenColumn(Value):
    """A column whose values are read from text, with the marks of its missing ones."""

    role: str
    """What the column is for."""
    missing: tuple[str, ...] = omitted(())
    """Text that is a missing value in this column, beside the usual marks (empty, NA, null, #N/A ...)."""
    not_missing: tuple[str, ...] = omitted(())
    """Usual marks that are values in this column, such as NA among codes of countries."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All text that is a missing value in this column."""
        return (*(mark for mark in MISSING_MARKS if mark not in self.not_missing), *self.missing)


class LabelColumn(Value):
    """The column that is predicted, without missing values: exactly two values, or what `where` or `share` make
    of it."""

    role: Literal["label"] = "label"
    """What the column is for."""
    positive: str | None = None
    """The value that counts as 1; null if it is obvious (1, true, yes, click ...)."""
    where: str | None = omitted(None)
    """A comparison with a number or a word, such as `>=4` or `!=canceled` (operators: >=, >, <=, <, ==, !=): the
    label is 1 for the rows whose value fulfils it."""
    share: Literal["count", "rate"] | None = omitted(None)
    """count: the column counts clicks among as many impressions as the weight column has; rate: it is a click
    rate or a probability. Either way a row becomes two, with label 1 and label 0, which share its weight (1 if no
    column has it) so."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(rule is not None for rule in (self.positive, self.where, self.share)) > 1:
            raise ValueError("give one of `positive`, `where` and `share`")
        if self.where is not None:
            rule = COMPARISON.fullmatch(self.where)
            if rule is None:
                raise ValueError(f"a comparison is such as '>=4' or '!=canceled', received {self.where!r}")
            if rule[1] not in ("==", "!=") and not re.fullmatch(
                r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", rule[2]
            ):
                raise ValueError(
                    f"{rule[1]} compares with a number, received {rule[2]!r}; words are compared by =="
                )
        return self


class TableKind(Value):
    """What kind of embedding table a column has: one of fixed rows, or one that grows."""

    growing: Growing | None = None
    """A table in which values get rows while it trains, of at most `capacity` rows; null: a row for each value
    from the start, as `min_count` and `hash_buckets` say."""


FIXED = TableKind()
MIN_COUNT = 2


def _fixed_or_growing(column: Any) -> Any:
    """Checks that a growing table has no settings of fixed rows."""
    if column.table.growing is None:
        return column
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
    return column


class CategoricalColumn(WrittenColumn):
    """A column with one value per example, looked up in an embedding table."""

    role: Literal["categorical"] = "categorical"
    """What the column is for."""
    min_count: int = Field(default=MIN_COUNT, ge=1)
    """A value seen fewer times in the training rows shares one id (out of vocabulary) with unseen ones."""
    hash_buckets: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """How values become rows of the table: a number N hashes them into N rows; null keeps a vocabulary of any
    size; auto keeps a vocabulary unless more than 5 million values reach `min_count`, and then hashes into
    4,194,304 rows."""
    table: TableKind = omitted(FIXED)
    """Kind of the table, such as `{growing: {capacity: 1000000, admit_after: 2, evict: lfu, ttl: null}}`; fixed
    rows if left out."""

    _check = model_validator(mode="after")(_fixed_or_growing)


class MultiHotColumn(WrittenColumn):
    """A column with any number of values per example; their embeddings are averaged."""

    role: Literal["multi_hot"] = "multi_hot"
    """What the column is for."""
    separator: str | None = Field(default=None, min_length=1)
    """Text between the values of a text column; null for a column of lists (Parquet)."""
    weight_mark: str | None = omitted(None, min_length=1)
    """Text between a value and its weight, such as the colon of `a:0.5|b:0.2`; weights are left out."""
    min_count: int = Field(default=MIN_COUNT, ge=1)
    """Least count of a value, as for a categorical column; every value of a bag counts."""
    hash_buckets: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """How values become rows of the table, as for a categorical column."""
    table: TableKind = omitted(FIXED)
    """Kind of the table, as for a categorical column; left out: fixed rows."""

    _check = model_validator(mode="after")(_fixed_or_growing)


class NumericColumn(WrittenColumn):
    """A column of numbers, standardised with the mean and deviation of the training rows. The keys from `decimal`
    on tell how a number is written in text; a plain number (`1234.5`) is read in any case."""

    role: Literal["numeric"] = "numeric"
    """What the column is for."""
    transform: Literal["standard", "log"] = "standard"
    """standard, or log, which takes sign(x) log(1 + |x|) first: for counts and amounts with a heavy tail."""
    buckets: Annotated[int, Field(ge=2)] | None = None
    """Largest number of buckets, which are quantiles of the training rows, for a further embedding table
    `COLUMN__bucket`; null: no such table."""
    decimal: DecimalMark = omitted(POINT)
    """Mark before the decimals of a number that is written as text; with a comma the point may group thousands:
    1.234,50."""
    thousands: str = omitted("")
    """Mark that groups thousands, such as the comma of 1,234.50."""
    prefix: str = omitted("")
    """Text before the number, such as $."""
    suffix: str = omitted("")
    """Text after the number, such as % or EUR."""
    multipliers: bool = omitted(False)
    """Whether k, M and B after a number multiply it: 12k is 12000."""
    bounds: bool = omitted(False)
    """Whether bounds are read as their number: >20, <=20 and 20+ are 20."""
    days_before: StampFormat | None = omitted(None)
    """Format of a time stamp, of which the number of days before the event is the input; null for a number."""


class TimestampColumn(WrittenColumn):
    """The column of the time at which the example happened (UTC). Splits rows by time; no model input but its
    derived tables."""

    role: Literal["timestamp"] = "timestamp"
    """What the column is for."""
    format: StampFormat = "iso"
    """How the time is written: 31.12.2026 and 31/12/2026 17:05:09 are day_first, 12/31/2026 5:05 PM is
    month_first, 10/Nov/2026:13:55:36 +0000 and Nov 10, 2026 are month_name. Columns that Parquet types as time
    stamps need none. With `month` and `day` it is a year."""
    month: str | None = omitted(None)
    """Column of the month, if this one holds the year alone."""
    day: str | None = omitted(None)
    """Column of the day of the month, beside `month`."""
    time: str | None = omitted(None)
    """Column of the time of day, if this one holds the date alone."""
    derive: tuple[Cycle, ...] = CYCLES
    """Categorical tables made from it; a table is left out if the training rows do not span its cycle."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.month is None) != (self.day is None):
            raise ValueError("a time stamp in three columns names both its month and its day")
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """Columns of the month, the day and the time of day, as far as this column does not hold them."""
        return tuple(name for name in (self.month, self.day, self.time) if name is not None)


class WeightColumn(Value):
    """The column of the example's weight in the loss and in every metric; not negative."""

    role: Literal["weight"] = "weight"
    """What the column is for."""


class OracleColumn(Value):
    """The column of the true probability in a generated log: kept beside the label, never a model input."""

    role: Literal["oracle"] = "oracle"
    """What the column is for."""


class SplitColumn(WrittenColumn):
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
ROLES: dict[str, type[Column]] = {kind.model_fields["role"].default: kind for kind in get_args(Column)}
TableColumn = CategoricalColumn | MultiHotColumn


SPLITS = ("train", "validation", "test")
"""The parts of a log, in the order in which they are numbered (0, 1, 2) while rows are dealt out."""


SplitBy = Literal["timestamp", "order", "random", "auto", "files", "column"]
SplitPart = float | tuple[str, ...]
"""A fraction of the rows, or names of files or values of a column."""


def one_form(value: Any) -> Any:
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
    stay together; order: the same by position in the log; random: by a seeded hash of file and row number; files:
    by file name; column: by the values of the column with the role split. auto is decided once all rows are read:
    timestamp if the log has one; random if the first 100,000 rows are of one class, or the log is sorted by its
    label or by a column that is neither a time nor a counter of rows; else order."""
    validation: SplitPart = 0.1
    """Fraction of the rows for validation; with `by: files` a list of file names, with `by: column` of values.
    The name of a file in a folder that is the log is its path in there (`day1/part-0.parquet`). With
    the other rules one of validation and test may be a list too, of values if a column has the role split, else of
    file names; the fraction is then of the other rows."""
    test: SplitPart = 0.1
    """Fraction of the rows for test, or a list, as for validation. Rows in neither are training rows."""

    _one_form = field_validator("validation", "test", mode="before")(one_form)

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
        """Fractions of validation and test; 0 if a list names the rows."""
        validation = self.validation if isinstance(self.validation, float) else 0.0
        return validation, self.test if isinstance(self.test, float) else 0.0

    def names(self, split: Literal["validation", "test"]) -> tuple[str, ...]:
        """Returns the files or values that make up a split; none if it is a fraction."""
        part = self.validation if split == "validation" else self.test
        return part if isinstance(part, tuple) else ()


class CsvDialect(Value):
    """How a text file is written; the defaults are the plain way."""

    delimiter: str = ","
    quote: str = '"'
    escape: str = ""
    skip: int = 0
    header: bool = True

    def described(self) -> str:
        """Returns what is not plain, in words."""
        words = {
            f"{shown(self.delimiter)} between fields": self.delimiter != ",",
            f"{shown(self.quote)} around fields" if self.quote else "no quotes": self.quote != '"',
            f"{self.escape} before what stands for itself": bool(self.escape),
            f"the first {self.skip} lines left out": bool(self.skip),
            "no header": not self.header,
        }
        return ", ".join(each for each, holds in words.items() if holds)


def shown(mark: str) -> str:
    """Returns a character as it can be read and typed."""
    return mark if mark.isprintable() and mark != " " else repr(mark)[1:-1] if mark != " " else "a space"


PLAIN_CSV = CsvDialect()


class GivenDialect(Value):
    """How text files are written, as far as it is said; what is null is found out, file by file."""

    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    r"""Character between fields, such as `;`, `\t` or `\x01`."""
    quote: str | None = Field(default=None, max_length=1)
    """Character around fields that hold a delimiter; none (`csv.quote=`) if quotes are part of the text."""
    escape: str | None = Field(default=None, max_length=1)
    r"""Character that takes its meaning from the quote or the delimiter after it: `\`, as Spark, Hive and MySQL
    write; none (`csv.escape=`) if quotes inside quotes are doubled."""
    skip: int | None = Field(default=None, ge=0)
    """Number of lines before the header, or before the first row if there is no header."""
    header: bool | None = None
    """Whether names of the columns come first. Without them columns are called c0, c1 and so on."""

    @field_validator("delimiter", "quote", "escape", mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        r"""Reads `\t`, `\x01` and `\001` as the characters that they stand for."""
        if not isinstance(value, str) or not re.fullmatch(r"\\(t|x[0-9a-fA-F]{2}|[0-7]{1,3})", value):
            return "\t" if value == "tab" else value
        return value.encode().decode("unicode_escape")

    @model_validator(mode="after")
    def _check(self) -> Self:
        marks = [mark for mark in (self.delimiter, self.quote, self.escape) if mark]
        if any(not mark.isascii() or mark in "\r\n" for mark in marks) or len(set(marks)) < len(marks):
            raise ValueError(
                "delimiter, quote and escape are different ASCII characters, and no ends of lines"
            )
        return self

    @property
    def said(self) -> dict[str, Any]:
        """What is said, by key."""
        return {key: value for key, value in self.to_dict().items() if value is not None}

    def over(self, other: GivenDialect) -> GivenDialect:
        """Returns this dialect, completed by what another one has."""
        return other.replace(**self.said)


UNSAID = GivenDialect()
"""Nothing is said: all is found out."""


class LogSchema(Value):
    """The roles of all columns of a log, in its order; columns it does not name are not used."""

    columns: dict[str, Annotated[Column, Field(discriminator="role")]]
    """Role and settings of each column, by its name."""
    split: SplitRule = SplitRule()
    """Which rows are train, validation and test."""
    negative_sampling_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """The fraction of negatives that were kept when the log was written; 1 when all were."""
    csv: GivenDialect = omitted(UNSAID)
    """How text files of the log are written, if it is not with commas, double quotes and a header."""

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
        for name in self.event.parts if self.event else ():
            if name not in self.columns:
                raise ValueError(f"{self.timestamp} goes with {name!r}, and no column has this name")
        ages = [name for name, column in self.numeric.items() if column.days_before]
        if ages and self.timestamp is None:
            raise ValueError(f"{ages[0]} is in days before the event, and no column has the role timestamp")
        if self.label_column.share == "count" and self.weight is None:
            raise ValueError(
                f"the label {self.label!r} counts clicks: give its column of impressions the role weight"
            )
        if self.pairs and self.negative_sampling_rate != 1.0:
            raise ValueError(
                f"the label {self.label!r} is a share of clicks, which has its negatives in it: "
                f"negative_sampling_rate is 1, not {self.negative_sampling_rate:g}"
            )
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
        return self

    def of_rows(self) -> dict[str, Any]:
        """Returns the schema as plain data without `csv`: equal for equal rows, however they are written."""
        return {key: value for key, value in self.to_dict().items() if key != "csv"}

    def _only(self, role: str) -> str | None:
        return next((name for name, column in self.columns.items() if column.role == role), None)

    @property
    def label(self) -> str:
        """Name of the label column."""
        return self._only("label")  # type: ignore[return-value]  # checked at birth

    @property
    def label_column(self) -> LabelColumn:
        """What is said of the label column."""
        return self.columns[self.label]  # type: ignore[return-value]

    @property
    def pairs(self) -> bool:
        """Whether rows become two each, with label 1 and label 0, at preparation."""
        return self.label_column.share is not None

    @property
    def batch_weight(self) -> str | None:
        """Name of the column of typed batches that holds weights: of pairs, each row's own part."""
        return PAIR_WEIGHT if self.pairs else self.weight

    @property
    def timestamp(self) -> str | None:
        """Name of the time stamp column."""
        return self._only("timestamp")

    @property
    def event(self) -> TimestampColumn | None:
        """What is said of the time stamp column."""
        return self.columns.get(self.timestamp or "")  # type: ignore[return-value]  # by its role

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
        """Name of the column whose values `split` lists; None if it lists files, or nothing."""
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
        return self.event.derive if self.event else ()

    @cached_property
    def categorical(self) -> dict[str, CategoricalColumn]:
        """Categorical columns by name."""
        return {name: each for name, each in self.columns.items() if isinstance(each, CategoricalColumn)}

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
        needed = {*self.tables, *self.numeric}
        if self.event and (self.cycles or any(column.days_before for column in self.numeric.values())):
            needed |= {str(self.timestamp), *self.event.parts}
        return tuple(name for name in self.columns if name in needed)

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that are read: not ignored ones, nor one of splits that `split` has no use for."""
        parts = self.event.parts if self.event else ()
        return tuple(
            name
            for name, column in self.columns.items()
            if name in parts
            or (column.role != "ignore" and (column.role != "split" or name == self.split_column))
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """Text that is a missing value in every column that is read, so that a parser may take it for one."""
        written = [column for column in self.columns.values() if isinstance(column, WrittenColumn)]
        return tuple(
            mark for mark in MISSING_MARKS if all(mark not in column.not_missing for column in written)
        )
