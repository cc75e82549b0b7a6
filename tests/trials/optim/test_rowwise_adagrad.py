"""Row-wise Adagrad touches the rows looked up, and them as its definition says."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from trials.optim.rowwise_adagrad import EPSILON, RowWiseAdagrad, summed_by_row


def run(steps: int, *, lr: float, decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A few steps by the optimizer, and by its definition on the dense gradient."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(6, 3))
    reference, sums = table.detach().clone(), torch.zeros(6)
    optimizer = RowWiseAdagrad([table], lr=lr, decay=decay)
    for step in range(steps):
        ids = torch.tensor([0, 2, 2, (step + 3) % 6])
        target = torch.randn(4, 3)
        F.embedding(ids, table, sparse=True).sub(target).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gradient = torch.zeros(6, 3).index_add_(0, ids, 2 * (reference[ids] - target))
        touched = torch.unique(ids)
        gradient[touched] += decay * reference[touched]
        sums[touched] += gradient[touched].square().mean(dim=1)
        reference[touched] -= lr * gradient[touched] / (sums[touched].sqrt() + EPSILON).unsqueeze(1)
    return table.detach(), reference


def test_follows_its_definition() -> None:
    for decay in (0.0, 0.1):
        table, reference = run(5, lr=0.1, decay=decay)
        torch.testing.assert_close(table, reference)


def test_rows_not_looked_up_stay() -> None:
    table, _ = run(1, lr=0.1, decay=0.5)
    torch.manual_seed(0)
    before = torch.randn(6, 3)
    assert torch.equal(table[[1, 4, 5]], before[[1, 4, 5]])
    assert not torch.equal(table[[0, 2, 3]], before[[0, 2, 3]])


def test_table_decay_is_exact_though_lazy() -> None:
    """Rows shrink at every step, whenever they are looked up, also under changing learning rates."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(8, 3))
    reference, sums = table.detach().clone(), torch.zeros(8)
    optimizer = RowWiseAdagrad([table], lr=0.2, table_decay=0.1)
    for step in range(12):
        lr = optimizer.param_groups[0]["lr"] = 0.2 / (step + 1)
        ids = torch.tensor([step % 5, step % 5, (3 * step) % 7])  # row 7 is never looked up
        optimizer.catch_up(table, ids)
        torch.testing.assert_close(table[ids], reference[ids])
        target = torch.randn(3, 3)
        F.embedding(ids, table, sparse=True).sub(target).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gradient = torch.zeros(8, 3).index_add_(0, ids, 2 * (reference[ids] - target))
        sums[ids.unique()] += gradient[ids.unique()].square().mean(dim=1)
        reference *= 1 - lr * 0.1
        reference -= lr * gradient / (sums.sqrt() + EPSILON).unsqueeze(1)
    optimizer.settle()
    torch.testing.assert_close(table.detach(), reference)


def test_gradients_of_several_lookups_add_up() -> None:
    """Two lookups of one table in a step, as a categorical and a multi-hot column make."""
    table = torch.nn.Parameter(torch.randn(5, 2))
    first, second = torch.tensor([4, 1, 1]), torch.tensor([1, 0])
    (
        F.embedding(first, table, sparse=True).sum() + 2 * F.embedding(second, table, sparse=True).sum()
    ).backward()
    rows, gradient_RD = summed_by_row(table, torch.zeros(5, dtype=torch.int64))
    assert dict(zip(rows.tolist(), gradient_RD[:, 0].tolist(), strict=True)) == {4: 1.0, 1: 4.0, 0: 2.0}
