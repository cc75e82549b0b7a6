"""Which rows and keys are which server's: each is one server's, and none is left out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from dhen.inputs.features import EmbeddingTables
from dhen.inputs.growing import GrowingRows
from dhen.schema import FeatureSchema, Growing, Table
from trials.training.servers.messages import (
    Share,
    growing_shares,
    numbers_of,
    schema_of_shares,
    server_of_keys,
)


def schema(*capacities: int) -> FeatureSchema:
    growing = [
        Table(name=f"g{i}", rows=capacity + 1, growing=Growing(capacity=capacity, ttl=7))
        for i, capacity in enumerate(capacities)
    ]
    return FeatureSchema(tables=(Table(name="fixed", rows=5), *growing), numeric=("x",))


@given(st.integers(1, 7), st.integers(0, 50))
def test_the_parts_of_all_servers_are_the_whole(servers: int, rows: int) -> None:
    whole, again = torch.arange(rows), torch.full((rows,), -1)
    for server in range(servers):
        share = Share(server, servers)
        part = share.part(whole)
        assert len(part) == share.count(rows)
        assert torch.equal(part.remainder(servers), torch.full_like(part, server))
        share.put(part, again)
    assert torch.equal(again, whole)


@given(st.integers(1, 4), st.integers(4, 30), st.integers(4, 30))
def test_each_growing_row_is_one_servers(servers: int, first: int, second: int) -> None:
    tables = schema(first, second)
    whole = GrowingRows(tables)
    matrices = {"weight": EmbeddingTables(tables, 2)}
    numbers = []
    for server in range(servers):
        share = Share(server, servers)
        shares = growing_shares(matrices, whole, share)
        own_schema = schema_of_shares(tables, whole, shares, turns=3)
        assert [table.growing.ttl for table in own_schema.growing if table.growing] == [21, 21]
        own = GrowingRows(own_schema)
        number_R = numbers_of(whole, own, shares, share)
        numbers += number_R[1:].tolist()
        for its, span, start in zip(shares, own.spans, whole.starts, strict=False):
            # the row that a server gives a key is the row of the matrix that it has
            in_matrix = its.start + number_R[span] - start
            assert torch.equal(in_matrix.remainder(servers), torch.full_like(in_matrix, server))
            assert torch.equal(in_matrix // servers, torch.arange(its.place, its.place + its.count))
    assert sorted(numbers) == list(range(1, first + second + 1))


def test_more_servers_than_rows_are_refused() -> None:
    tables = schema(3)
    matrices = {"weight": EmbeddingTables(tables, 2)}
    shares = [Share(server, 4) for server in range(4)]
    without = next(share for share in shares if not share.count(9) - share.count(6))  # of rows 6 to 8
    with pytest.raises(UserError, match="servers=3 at most"):
        growing_shares(matrices, GrowingRows(tables), without)


def test_keys_are_spread_evenly() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (30_000,), generator=torch.Generator().manual_seed(0))
    counts = server_of_keys(keys, 3).bincount(minlength=3)
    assert counts.min() > 9_500
    assert (
        int((server_of_keys(torch.arange(1, 3001), 3)).bincount(minlength=3).min()) > 900
    )  # also of poor hashes
