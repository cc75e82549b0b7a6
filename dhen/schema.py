"""FeatureSchema: what the data decides about a model (tables, their sizes, numeric columns).

The other half, what a search decides, is `dhen.config`. Pure values: no data, no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dhen.values import Value, milliseconds_of


def parse_ttl(value: Any) -> int | str:
    """Returns a number of steps, or a length of time such as `3d`, as it was given.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, str) and milliseconds_of(value):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError("expected a time such as 3d, 6h or 30m, or a number of training steps above 0")


Ttl = Annotated[int | str, BeforeValidator(parse_ttl)]
"""How long an id may not occur before it gives its row back: a number of training steps, or a length of time."""


class Growing(Value):
    """How a growing table (a hash table of embeddings) takes ids in and gives their rows to others."""

    capacity: int = Field(gt=0)
    """Largest number of ids that have a row at the same time."""
    admit_after: int = Field(default=2, ge=1, le=255)
    """Number of occurrences of an id, within one pass, from which on it has a row of its own. Before, and if it
    is missing or was never seen, it shares the default row, which is learnt."""
    evict: Literal["lfu", "lru"] = "lfu"
    """Ids that give way if the table is full: lfu (those that occur least often, to ids that surely occur more
    often; a newcomer as frequent as they waits) or lru (those that were not seen for longest, to any)."""
    ttl: Ttl | None = None
    """Time without an occurrence after which an id gives its row back, at most a sixteenth later: `3d`, `6h` or
    `30m` by the log's time stamps, or a number of training steps; null: never. By time stamps, now is the newest
    one of the rows trained on so far, all over again in each pass; it needs a log that has them, and
    `training.order: log`."""
    # left out of plain data if it is the default, so that jobs of before it was a field keep their fingerprint
    missing: Literal["default", "own"] = Field(default="default", exclude_if=lambda row: row == "default")
    """Row of a missing value: the default row, or one of its own, which it gets and loses as an id does. Tables
    that were static in a bundle have it of their own (`train --from-weights growing.columns=`)."""

    @property
    def ttl_milliseconds(self) -> int | None:
        """The same in milliseconds of the log's time; None if it is of steps, or never."""
        return milliseconds_of(self.ttl) if isinstance(self.ttl, str) else None

    @property
    def ttl_steps(self) -> int | None:
        """The same in training steps; None if it is of the log's time, or never."""
        return self.ttl if isinstance(self.ttl, int) else None


class Table(Value):
    """One embedding table: a categorical column (one id per example) or a multi-hot one (a bag of ids)."""

    name: str
    """The column of the log."""
    rows: int = Field(gt=0)
    """Number of rows: ids run from 0 to rows - 1, those for missing and out-of-vocabulary values included."""
    multi_hot: bool = False
    """Whether an example has any number of ids, whose embeddings are averaged (none gives zeros)."""
    mean_ids: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Mean number of ids per example (the pooling factor); 1 if the column is not multi-hot."""
    repeats: tuple[float, ...] = Field(default=(), exclude_if=lambda shares: not shares)
    """Shares of the ids looked up in one pass that find one of the 1, 2, 4, ... rows that occur most (the last
    share: any row) and are not its first lookup: how often a cache of so many rows has the row of an id. Empty
    if ids were not counted."""
    # left out of plain data if false, so that jobs of before it was a field keep their fingerprint
    buckets: bool = Field(default=False, exclude_if=lambda buckets: not buckets)
    """Whether its ids are the buckets of a number, which is a numeric input as well (the model's
    `buckets`)."""
    growing: Growing | None = Field(default=None, exclude_if=lambda growing: growing is None)
    """How ids get rows while the table trains; None if every id has its row from the start. Row 0 of a growing
    table is the default row, so it has one row more than its capacity."""

    @model_validator(mode="after")
    def _has_a_share_for_each_number_of_rows(self) -> Self:
        if self.repeats and len(self.repeats) != len(kept_rows(self.rows)):
            raise ValueError(f"repeats of {self.rows} rows are {len(kept_rows(self.rows))} shares")
        return self


def kept_rows(rows: int) -> tuple[int, ...]:
    """The numbers of rows that `Table.repeats` is about: powers of two, and all rows."""
    return (*(2**power for power in range((rows - 1).bit_length())), rows)


def node_names(table: str) -> tuple[str, str]:
    """The names of the two tables, of even and of odd nodes, that take the place of one whose buckets are
    interpolated."""
    return f"{table}_even", f"{table}_odd"


class FeatureSchema(Value):
    """The inputs of a model, in the order in which batches hold them."""

    tables: tuple[Table, ...] = ()
    """All embedding tables: categorical first, those of buckets, then multi-hot."""
    numeric: tuple[str, ...] = ()
    """Numeric inputs after transformation, missing-value indicators included."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError("two tables have the same name")
        if not names and not self.numeric:
            raise ValueError("a log needs at least one feature column besides its label")
        kinds = [(table.multi_hot, table.buckets) for table in self.tables]
        if kinds != sorted(kinds) or (True, True) in kinds:
            raise ValueError("categorical tables go first, then those of buckets, then multi-hot ones")
        if any(table.growing and table.rows != table.growing.capacity + 1 for table in self.tables):
            raise ValueError("a growing table has a row for each id of its capacity, and the default row")
        if self.bucketed and not self.numeric:
            raise ValueError("tables of buckets are of numeric inputs, of which there are none")
        return self

    @property
    def categorical(self) -> tuple[Table, ...]:
        """Tables with exactly one id per example."""
        return tuple(table for table in self.tables if not table.multi_hot)

    @property
    def multi_hot(self) -> tuple[Table, ...]:
        """Tables with a bag of ids per example."""
        return tuple(table for table in self.tables if table.multi_hot)

    @property
    def growing(self) -> tuple[Table, ...]:
        """Tables whose ids get rows while they train, in order: categorical ones, then multi-hot ones."""
        return tuple(table for table in self.tables if table.growing is not None)

    @property
    def timed(self) -> bool:
        """Whether ids give their rows back by the log's time stamps, so that training needs those of its
        batches."""
        return any(table.growing.ttl_milliseconds for table in self.growing if table.growing is not None)

    @property
    def growing_columns(self) -> tuple[int, ...]:
        """Places of the growing tables among the categorical ones."""
        return tuple(place for place, table in enumerate(self.categorical) if table.growing is not None)

    @property
    def bucketed(self) -> tuple[Table, ...]:
        """Tables of the buckets of numbers, the last of the categorical ones."""
        return tuple(table for table in self.tables if table.buckets)

    @property
    def total_rows(self) -> int:
        """Rows of all tables together."""
        return sum(table.rows for table in self.tables)
