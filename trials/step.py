"""One training step: forward, cross-entropy, backward, the update of the dense part and of the tables."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from trials.checkpoint import Weights
from trials.data.loader import Batch
from trials.job import TrainingConfig
from trials.master_weights import MasterWeights, embedding_tables
from trials.row_wise_adagrad import RowWiseAdagrad


class TrainStep:
    """A model and its optimizers: fused AdamW on the dense part, row-wise Adagrad on the tables."""

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        """Takes the model over; `config` must be resolved."""
        assert config.precision != "auto"
        self.model = model
        self._master = MasterWeights(model, config.precision)
        self._dense = AdamW(
            [self._master.flat], lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self._tables = embedding_tables(model)
        self._sparse = (
            RowWiseAdagrad(
                [table.weight for table in self._tables],
                lr=config.embedding_learning_rate,
                decay=config.embedding_decay,
                table_decay=config.table_decay,
            )
            if self._tables
            else None
        )
        self._lazy = bool(self._tables and config.table_decay)
        self._optimizers: list[Optimizer] = [self._dense, *([self._sparse] if self._sparse else [])]
        self._initial_rates: list[float] = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]

    def __call__(self, batch: Batch) -> Tensor:
        """One update; returns the batch's loss, detached."""
        if self._lazy:
            self._catch_up(batch)
        logit_B = self.model(batch.features).float()
        loss = F.binary_cross_entropy_with_logits(logit_B, batch.label_B, weight=batch.weight_B)
        loss.backward()  # type: ignore[no-untyped-call]
        self._master.gather_gradients()
        for optimizer in self._optimizers:
            optimizer.step()
        self._master.publish()
        for table in self._tables:
            table.weight.grad = None
        return loss.detach()

    def scale_learning_rates(self, factor: float) -> float:
        """Sets learning rates to a multiple of the configured ones; the dense part's, for the record."""
        for optimizer, rate in zip(self._optimizers, self._initial_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        return self._initial_rates[0] * factor

    def settle(self) -> None:
        """Brings all table rows up to date; to be called before the model is evaluated or saved."""
        if self._lazy and self._sparse is not None:
            self._sparse.settle()

    def is_finite(self) -> bool:
        """Whether no dense weight is NaN or infinite (ReLU can hide one from the loss)."""
        return bool(self._master.flat.isfinite().all())

    def weights(self) -> Weights:
        """A copy of the model's weights on the CPU, in fp32."""
        return self._master.weights()

    def _catch_up(self, batch: Batch) -> None:
        assert self._sparse is not None
        for table in self._tables:
            self._sparse.catch_up(table.weight, table.rows(batch.features))
