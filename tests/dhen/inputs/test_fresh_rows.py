"""A part of fresh tables has the weights that it has among all, and so has what is built after it."""

from __future__ import annotations

import pytest
import torch

from dhen.inputs.growing import BLOCK_ROWS, fresh_rows, part_of_tables
from dhen.schema import Growing, Table

STATIC = (Table(name="a", rows=70_001), Table(name="b", rows=3), Table(name="c", rows=2 * BLOCK_ROWS + 5))
GROWING = (
    Table(name="a", rows=11, growing=Growing(capacity=10)),
    Table(name="b", rows=BLOCK_ROWS + 7),
    Table(name="c", rows=21, growing=Growing(capacity=20)),
)
FEW = (Table(name="a", rows=2), Table(name="b", rows=1))


@pytest.mark.parametrize("tables", [STATIC, GROWING, FEW])
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_parts_are_those_of_the_whole(tables: tuple[Table, ...], dim: int) -> None:
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + table.rows)
    torch.manual_seed(4)
    whole_RD, after = fresh_rows(tables, starts, dim), torch.rand(2)
    assert len(whole_RD) == starts[-1]
    for first, step in ((0, 1), (0, 3), (1, 3), (2, 3), (4, 5), (None, 1)):
        torch.manual_seed(4)
        with part_of_tables(first, step):
            part_PD = fresh_rows(tables, starts, dim)
        expected = whole_RD[:0] if first is None else whole_RD[first::step]
        assert torch.equal(part_PD, expected), (first, step)
        assert torch.equal(torch.rand(2), after)


def test_rows_of_a_growing_table_by_itself_are_zero_until_an_id_has_them() -> None:
    torch.full((4096, 8), 7.0)  # what memory may hold that nobody has cleared
    weight_RD = fresh_rows((Table(name="a", rows=4096, growing=Growing(capacity=4095)),), [0, 4096], 8)
    assert weight_RD[0].any()
    assert not weight_RD[1:].any()
