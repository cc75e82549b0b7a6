"""A bundle with growing tables in place of static ones, or the other way round, whose scores are the same.

A static table has a row for missing values (0), one for unknown ones (1) and one for each value of its
vocabulary; a growing one has the default row (0) and rows that keys have. Each row is copied to where the raw
values that had it find it, so every raw row of a log has the same score, to the bit:

growing to static: the vocabulary is of the hashes that have a row, in any network of an average. The row of
unknown values is the default row, and so is that of a hash which has its row in another network alone.
static to growing: each value of the vocabulary has a row under its hash, missing values have one of their own, and
the row of unknown values is the default row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dhen.atomic_write import atomic_folder
from dhen.config import ModelConfig
from dhen.cost import Costs, dense_parameters, embedding_parameters, within
from dhen.errors import UserError, unknown_name
from dhen.inputs.held_schema import held_schema
from dhen.inputs.key_index import EMPTY
from dhen.inputs.table_dims import table_dims
from dhen.model import build_model, model_cost
from dhen.schema import FeatureSchema, Growing
from search.bundles.bundle import (
    Bundle,
    BundleInfo,
    check_place,
    scores,
    weights_names,
    write_beside_weights,
)
from trials.data.encoding.convert import converted_rows, to_growing, to_static
from trials.data.encoding.encoding import Encoding
from trials.data.encoding.hashing import MISSING_KEY, Hashes
from trials.data.encoding.vocabulary import FIRST_ID, MISSING_ID, UNKNOWN_ID
from trials.embeddings.growing import growing_rows
from trials.optim.master_weights import embedding_tables
from trials.storage.weight_changes import KEYS
from trials.storage.weights_file import save_weights

Kind = Literal["growing", "static"]
ROOM = 2
"""Rows of a growing table for each that is taken, where no capacity is given: as many again are free."""
MOST_ADMIT_AFTER = 255


class ConvertedTable(NamedTuple):
    """What became of a table."""

    name: str
    taken: int
    """Number of values that have a row of their own, missing ones included where they do."""
    rows: int
    """Number of its rows now."""


def convert(
    bundle: Bundle, out: Path, kind: Kind, *, columns: Sequence[str] = (), capacity: int | None = None
) -> list[ConvertedTable]:
    """Writes a bundle with tables of the other kind, of the newest version of this one.

    Args:
        bundle: the bundle, which stays as it is.
        out: the folder of the new one.
        kind: what tables become.
        columns: columns whose tables are converted; all that can be where none is named.
        capacity: capacity of each growing table; None for twice as many rows as are taken.

    Returns:
        The tables that were converted, in the order of the schema.

    Raises:
        UserError: where there is nothing to convert, a table named cannot be, or the capacity is too small.
    """
    check_place(out)
    if out.resolve() == bundle.directory.resolve():
        raise UserError(f"{out} is the bundle that is converted; choose another --out.")
    if kind == "static" and capacity is not None:
        raise UserError(
            "--capacity is of growing tables; a static one has a row for each id that has one now."
        )
    if bundle.info.int8_tables is not None:
        raise UserError(
            f"{bundle.directory} has tables of 8 bits per value: convert first, then export --int8-tables."
        )
    model = bundle.model()
    old = [model] if bundle.info.job else list(model.networks)  # type: ignore[arg-type]
    names = _convertible(bundle, kind, columns)
    if kind == "growing":
        rules = {name: _rule(bundle, name, capacity) for name in names}
        encoding = to_growing(bundle.encoding, rules)
    else:
        encoding = to_static(bundle.encoding, {name: _hashes(old, name) for name in names})
    info = _info(bundle, encoding)
    new = [build_model(job.model, job.features) for job in info.jobs]
    for network, converted in zip(old, new, strict=True):
        _move(network, converted, bundle.encoding, encoding)
    rows = converted_rows(bundle.examples(), bundle.encoding, encoding)
    alone = zip(old, new, strict=True)
    assert all(torch.equal(bundle.scores(one), scores(other.eval(), rows)) for one, other in alone)
    with atomic_folder(out) as building:
        for network, name in zip(new, weights_names(info), strict=True):
            save_weights(network.state_dict(), building / name)
        write_beside_weights(building, info, encoding, rows, bundle.serving)
    made = {table.name: table for table in encoding.features.tables}
    return [ConvertedTable(name, _taken(bundle, encoding, name), made[name].rows) for name in names]


def _convertible(bundle: Bundle, kind: Kind, columns: Sequence[str]) -> list[str]:
    """Returns the columns whose tables are converted, in the order of the schema."""
    encoding = bundle.encoding
    tables = encoding.schema.tables
    for name in columns:
        if name not in tables:
            raise unknown_name("categorical or multi_hot column", name, tables)
    grows = {name for name in tables if encoding.schema.growing(name)}
    found = [
        name for name in tables if (name in grows if kind == "static" else name in encoding.vocabularies)
    ]
    for name in columns:
        if name not in found:
            is_so = (name in grows) == (kind == "growing")
            why = f"is {kind} already" if is_so else "is hashed into buckets, whose values are not known"
            raise UserError(f"--column {name}: its table {why}; it stays as it is. Leave it out.")
    if not found:
        kinds = {
            "static": "no table of it grows",
            "growing": "no table of it has a vocabulary (those that grow, that are hashed into buckets, and those "
            "of time stamps and numbers stay as they are)",
        }
        raise UserError(f"{bundle.directory}: there is nothing to convert: {kinds[kind]}.")
    return [name for name in found if name in columns or not columns]


def _rule(bundle: Bundle, name: str, capacity: int | None) -> Growing:
    """Returns how the table of a vocabulary grows from now on."""
    hashes, column = bundle.encoding.vocabularies[name].hashes, bundle.encoding.schema.tables[name]
    if len(np.unique(hashes)) < len(hashes):
        raise UserError(
            f"{name}: two of its values have the same hash, and would share a row of a growing table; name the "
            "other columns with --column."
        )
    taken = len(hashes) + 1  # and one for missing values
    least_share = min(job.model.capacity_share for job in bundle.info.jobs)
    if capacity is None:
        capacity = int(-(-ROOM * taken // least_share))
    held = max(1, round(least_share * capacity))
    if held < taken:
        share = f", of which a model has {held:,} (capacity_share={least_share})" if least_share < 1 else ""
        raise UserError(
            f"--capacity {capacity}{share} is less than the {taken:,} rows of {name} that are taken; give more."
        )
    admit_after = min(column.min_count, MOST_ADMIT_AFTER)
    return Growing(capacity=capacity, admit_after=admit_after, missing="own")


def _hashes(networks: Sequence[nn.Module], name: str) -> Hashes:
    """Returns the hashes of values (ascending) that have a row of a growing table in any of the networks."""
    keys = [_rows_of_keys(network, name)[0] for network in networks]
    found = torch.cat(keys).numpy()
    return np.unique(found[found != MISSING_KEY].view(np.uint64))


def _rows_of_keys(network: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Returns the keys that have a row of a growing table, and their rows."""
    growing = growing_rows(network)
    assert growing is not None
    return growing.held([table.name for table in growing.tables].index(name))


def _info(bundle: Bundle, encoding: Encoding) -> BundleInfo:
    """Returns what the new bundle says of itself: as the old one, with its own tables."""
    info, features = bundle.info, encoding.features
    for job in info.jobs:
        _check_lengths(job.model, job.features, features)
    costs = [model_cost(job.model, features) for job in info.jobs]
    members = tuple(member.replace(job=member.job.replace(features=features)) for member in info.members)
    return info.replace(
        job=info.job.replace(features=features) if info.job else None,
        members=members,
        cost=costs[0] if info.job else _of_members(costs),
        parameters=sum(map(dense_parameters, costs)),
        embedding_parameters=sum(map(embedding_parameters, costs)),
        version=None,
        trained=bundle.trained,
        converted=bundle.version,
    )


def _of_members(costs: Sequence[Costs]) -> Costs:
    return tuple(row for place, cost in enumerate(costs) for row in within(f"member{place}", cost))


def _check_lengths(model: ModelConfig, old: FeatureSchema, new: FeatureSchema) -> None:
    """Checks that embeddings keep their lengths, which may follow from numbers of rows."""
    lengths = zip(held_schema(model, new).tables, table_dims(model, old), table_dims(model, new), strict=True)
    for table, before, after in lengths:
        if before != after:
            raise UserError(
                f"with table_dim_exponent={model.table_dim_exponent} the length of embeddings follows from the "
                f"numbers of rows, and that of {table.name} would be {after} in place of {before}: give another "
                "--capacity, or name fewer columns with --column."
            )


@torch.no_grad()
def _move(old: nn.Module, new: nn.Module, before: Encoding, after: Encoding) -> None:
    """Gives a fresh network the weights of another, row by row where the kind of a table is another one."""
    tables = _table_weights(old)
    moved = {f"{name}.weight" for name, module in old.named_modules() if module in embedding_tables(old)}
    given = new.state_dict()
    for name, tensor in old.state_dict().items():
        if name not in moved and name != KEYS:
            given[name].copy_(tensor)
    for name, weight_RD in _table_weights(new).items():
        source_R = _sources(old, name, before, after)
        if source_R is None:
            weight_RD.copy_(tables[name])
        else:
            weight_RD.zero_()
            weight_RD[: len(source_R)] = tables[name][source_R]
    _give_keys(old, new, before)


def _table_weights(network: nn.Module) -> Mapping[str, Tensor]:
    """Returns the weights of each table, as views."""
    found: dict[str, Tensor] = {}
    for matrix in embedding_tables(network):
        parts = torch.split(matrix.weight.detach(), [table.rows for table in matrix.tables])
        found |= {table.name: part for table, part in zip(matrix.tables, parts, strict=True)}
    return found


def _sources(old: nn.Module, name: str, before: Encoding, after: Encoding) -> Tensor | None:
    """Returns for the first rows of a new table the old rows that they have the weights of; None where the table
    is what it was."""
    grew, grows = (
        name in encoding.schema.tables and encoding.schema.growing(name) for encoding in (before, after)
    )
    if bool(grew) == bool(grows):
        return None
    if grows:
        values = torch.arange(FIRST_ID, FIRST_ID + len(before.vocabularies[name]))
        return torch.cat([torch.tensor([UNKNOWN_ID, MISSING_ID]), values])
    key_N, row_N = _rows_of_keys(old, name)
    wanted = torch.from_numpy(after.vocabularies[name].hashes.view(np.int64))
    wanted = torch.cat([torch.tensor([MISSING_KEY, EMPTY]), wanted])
    sorted_N, order_N = torch.cat([key_N, torch.tensor([EMPTY])]).sort()
    row_N = torch.cat([row_N, torch.tensor([0])])[order_N]
    place = torch.searchsorted(sorted_N, wanted).clamp_(max=len(sorted_N) - 1)
    return torch.where(sorted_N[place] == wanted, row_N[place], 0)


def _give_keys(old: nn.Module, new: nn.Module, before: Encoding) -> None:
    """Gives the rows of growing tables to the keys whose weights they have."""
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
    growing.build_index()


def _taken(bundle: Bundle, encoding: Encoding, name: str) -> int:
    """Returns how many values have a row of their own."""
    vocabulary = encoding.vocabularies.get(name)
    return len(vocabulary) if vocabulary is not None else len(bundle.encoding.vocabularies[name]) + 1
