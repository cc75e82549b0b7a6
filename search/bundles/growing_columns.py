"""A bundle's weights with growing tables in place of static ones, or the other way round: every score stays.

A static table has a row for missing values (0), one for unknown ones (1) and one for each value of its
vocabulary; a growing one has the default row (0) and rows that keys have. Each row is copied to where the raw
values that had it find it, so every raw row of a log has the same score, to the bit:

growing to static: the vocabulary is of the hashes that have a row, since a growing table keeps no values. A log
could give the values, but only those that it has; the others would lose what they have learnt. The row of unknown
values is the default row.
static to growing: each value of the vocabulary has a row under its hash, missing values have one of their own, and
the row of unknown values is the default row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from dhen.config import ModelConfig
from dhen.errors import UserError, unknown_name
from dhen.inputs.growing import EMPTY, unfilled_tables
from dhen.inputs.lift import held_schema, table_dims
from dhen.model import build_model
from dhen.schema import Growing
from dhen.values import parse
from search.bundles.bundle import Bundle
from trials.data.encoding import Encoding
from trials.data.log_schema import FIXED, MIN_COUNT, Column, LogSchema, TableKind
from trials.data.read_options import GivenGrowing
from trials.data.vocabulary import (
    FIRST_ID,
    HASH,
    MISSING_ID,
    MISSING_KEY,
    UNKNOWN_ID,
    Vocabulary,
)
from trials.optim.adamw import embedding_tables
from trials.store.weights import KEYS, adopt_weights, save_weights
from trials.training.embeddings.growing import growing_rows

ROOM = 2
"""Rows of a growing table for each that is taken, if no capacity is given: as many again are free."""


def with_growing_columns(bundle: Bundle, member: int | None, growing: GivenGrowing, file: Path) -> Encoding:
    """Writes a file of weights that score as a bundle's network does, while other tables grow.

    Args:
        bundle: the bundle.
        member: the network of a bundle that is an average; None if it is one network.
        growing: `columns` are those whose tables grow; the rest is for those among them that were static.
        file: the new weights file.

    Returns:
        The encoding that the weights are for.

    Raises:
        UserError: if a table cannot grow, the capacity is too small, or training cannot go on from the bundle.
    """
    weights, job = bundle.weights(member), bundle.job(member)
    with unfilled_tables():
        old = build_model(job.model, job.features)
    adopt_weights(old, weights, mapped=False)
    before, schema = bundle.encoding, bundle.encoding.schema
    wanted = growing.columns or ()
    for name in wanted:
        if name not in schema.tables:
            raise unknown_name("categorical or multi_hot column", name, schema.tables)
    columns: dict[str, Column] = dict(schema.columns)
    vocabularies = dict(before.vocabularies)
    for name, column in schema.tables.items():
        rule = schema.growing(name)
        if name in wanted and rule is None:
            rule = _rule(bundle, name, job.model, growing)
            columns[name] = column.replace(table=TableKind(growing=rule), min_count=MIN_COUNT)
            del vocabularies[name]
        elif name not in wanted and rule is not None:
            columns[name] = column.replace(table=FIXED, min_count=rule.admit_after)
            # the hashes of values (ascending) that have a row
            keys = _rows_of_keys(old, name)[0].numpy()
            vocabularies[name] = Vocabulary(
                pa.table({HASH: np.unique(keys[keys != MISSING_KEY].view(np.uint64))})
            )
    if growing != GivenGrowing(columns=wanted) and all(map(schema.growing, wanted)):
        raise UserError(
            "growing: a capacity and rules are for columns that begin to grow, and none of growing.columns does; "
            "leave them out."
        )
    data = {name: column.to_dict() for name, column in columns.items()}
    in_order = {name: vocabularies[name] for name in schema.tables if name in vocabularies}
    after = before.with_tables(parse(LogSchema, schema.to_dict() | {"columns": data}, "growing"), in_order)
    # embeddings keep their lengths, which may follow from numbers of rows
    tables = held_schema(job.model, after.features).tables
    lengths = (table_dims(job.model, features) for features in (job.features, after.features))
    for table, old_length, length in zip(tables, *lengths, strict=True):
        if old_length != length:
            raise UserError(
                f"with table_dim_exponent={job.model.table_dim_exponent} the length of embeddings follows from "
                f"the numbers of rows, and that of {table.name} would be {length} in place of {old_length}: give "
                "another growing.capacity, or other growing.columns."
            )
    new = build_model(job.model, after.features)
    _move(old, new, before, after)
    save_weights(new.state_dict(), file)
    return after


def _rule(bundle: Bundle, name: str, model: ModelConfig, growing: GivenGrowing) -> Growing:
    """Returns how the table of a vocabulary grows from now on."""
    vocabulary = bundle.encoding.vocabularies.get(name)
    share, capacity = model.capacity_share, growing.capacity
    if vocabulary is None:
        raise UserError(
            f"growing.columns: the values of {name} are hashed into buckets, so they cannot get rows of their "
            "own; leave it out."
        )
    hashes = vocabulary.hashes
    if len(np.unique(hashes)) < len(hashes):
        raise UserError(
            f"growing.columns: two values of {name} have the same hash, and would share a row of a growing table; "
            "leave it out."
        )
    taken = len(hashes) + 1  # and one for missing values
    if capacity is None:
        capacity = int(-(-ROOM * taken // share))
    if max(1, round(share * capacity)) < taken:
        of_model = f" times model.capacity_share={share}" if share < 1 else ""
        raise UserError(
            f"growing.capacity={capacity}{of_model} is less than the {taken:,} rows of {name} that are taken; "
            "give more."
        )
    return Growing(
        capacity=capacity,
        admit_after=growing.admit_after,
        evict=growing.evict,
        ttl=growing.ttl,
        missing="own",
    )


def _rows_of_keys(network: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Returns the keys that have a row of a growing table, and their rows."""
    growing = growing_rows(network)
    assert growing is not None
    return growing.held([table.name for table in growing.tables].index(name))


@torch.no_grad()
def _move(old: nn.Module, new: nn.Module, before: Encoding, after: Encoding) -> None:
    """Gives a fresh network the weights of another, row by row if the kind of a table is another one."""
    tables = _table_weights(old)
    moved = {f"{name}.weight" for name, module in old.named_modules() if module in embedding_tables(old)}
    given = new.state_dict()
    for name, tensor in old.state_dict().items():
        if name not in moved and name != KEYS:
            given[name].copy_(tensor)
    for name, weight_RD in _table_weights(new).items():
        grew, grows = (
            name in encoding.schema.tables and encoding.schema.growing(name) for encoding in (before, after)
        )
        if bool(grew) == bool(grows):
            weight_RD.copy_(tables[name])
            continue
        # for the first rows of the new table, the old rows that they have the weights of
        if grows:
            values = torch.arange(FIRST_ID, FIRST_ID + len(before.vocabularies[name]))
            source_R = torch.cat([torch.tensor([UNKNOWN_ID, MISSING_ID]), values])
        else:
            key_N, row_N = _rows_of_keys(old, name)
            wanted = torch.from_numpy(after.vocabularies[name].hashes.view(np.int64).copy())
            wanted = torch.cat([torch.tensor([MISSING_KEY, EMPTY]), wanted])
            sorted_N, order_N = torch.cat([key_N, torch.tensor([EMPTY])]).sort()
            row_N = torch.cat([row_N, torch.tensor([0])])[order_N]
            place = torch.searchsorted(sorted_N, wanted).clamp_(max=len(sorted_N) - 1)
            source_R = torch.where(sorted_N[place] == wanted, row_N[place], 0)
        weight_RD.zero_()
        weight_RD[: len(source_R)] = tables[name][source_R]
    # the rows of growing tables go to the keys whose weights they have
    growing, had = growing_rows(new), growing_rows(old)
    if growing is None:
        return
    places = {table.name: place for place, table in enumerate(had.tables)} if had is not None else {}
    for number, table in enumerate(growing.tables):
        if had is not None and table.name in places:
            growing.keys[growing.spans[number]] = had.keys[had.spans[places[table.name]]]
        else:
            hashes = before.vocabularies[table.name].hashes.view(np.int64)
            growing.give(number, torch.from_numpy(np.concatenate(([MISSING_KEY], hashes))))


def _table_weights(network: nn.Module) -> Mapping[str, Tensor]:
    """Returns the weights of each table, as views."""
    found: dict[str, Tensor] = {}
    for matrix in embedding_tables(network):
        parts = torch.split(matrix.weight.detach(), [table.rows for table in matrix.tables])
        found |= {table.name: part for table, part in zip(matrix.tables, parts, strict=True)}
    return found
