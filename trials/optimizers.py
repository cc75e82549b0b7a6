"""Two optimizers for one model: fused AdamW for the dense part, row-wise Adagrad for the tables.

Row-wise Adagrad (as FBGEMM and TorchRec train tables) keeps one float a row and touches the rows looked
up alone, so a step costs what a batch reads, not what the tables hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dhen.features import EmbeddingTables
from trials.job import TrainingConfig

EPSILON = 1e-8


class RowWiseAdagrad(Optimizer):
    """Adagrad with the mean square of a row's gradient as the row's one state; sparse gradients only.

    `decay` is L2 regularisation of the rows looked up (coupled, as the field's benchmarks have it).
    """

    def __init__(self, tables: Iterable[Tensor], *, lr: float, decay: float) -> None:
        super().__init__(tables, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of the rows that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, group["lr"], group["decay"])

    def _update(self, table: Tensor, lr: float, decay: float) -> None:
        gradient = table.grad
        assert gradient is not None
        assert gradient.is_sparse
        state = self.state[table]
        if not state:
            state["sum"] = torch.zeros(table.shape[0], dtype=torch.float32, device=table.device)
        gradient = gradient.coalesce()
        rows, values_RD = gradient.indices()[0], gradient.values()
        weights_RD = table.index_select(0, rows)
        if decay:
            values_RD = values_RD.add(weights_RD, alpha=decay)
        sums = state["sum"].index_select(0, rows).add_(values_RD.square().mean(dim=1))
        state["sum"].index_copy_(0, rows, sums)
        step_RD = values_RD.mul_(lr / sums.sqrt().add_(EPSILON).unsqueeze(1))
        table.index_copy_(0, rows, weights_RD.sub_(step_RD))


def make_optimizers(model: nn.Module, config: TrainingConfig) -> list[Optimizer]:
    """[dense, tables]; the second is left out where a log has no tables."""
    tables = [module.weight for module in model.modules() if isinstance(module, EmbeddingTables)]
    held = {id(table) for table in tables}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in held]
    optimizers: list[Optimizer] = [
        AdamW(dense, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
    ]
    if tables:
        optimizers.append(
            RowWiseAdagrad(tables, lr=config.embedding_learning_rate, decay=config.embedding_decay)
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # what schedules scale
    return optimizers
