"""Row-wise Adagrad touches the rows looked up, and them as its definition says."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from trials.optimizers import EPSILON, RowWiseAdagrad


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
