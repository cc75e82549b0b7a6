"""The dense part of a rank that trains on its own, whose weights are on the servers of the tables.

The rank computes with a copy. After backward its gradients go to the servers with those of the rows, and the
weights come back as all ranks' updates have made them (Downpour SGD, NIPS 2012).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from trials.checkpoint.dcp_vectors import FlatPieces
from trials.distributed.table_split import DenseInputs
from trials.job import TrainingConfig
from trials.optim.adamw import adamw
from trials.optim.clip import Clip
from trials.optim.master_weights import MasterWeights, all_finite
from trials.servers.server_tables import ServerTables
from trials.storage.weights_file import Weights


class ServedDense:
    """The engine of dp on servers."""

    def __init__(self, model: nn.Module, config: TrainingConfig, tables: ServerTables) -> None:
        """Takes a model over whose tables were taken, with the weights that the servers have made too."""
        assert config.precision != "auto"
        self.module, self._tables = model, tables
        self._master = MasterWeights(model, config.precision)
        self.optimizer, self.clip = adamw([self._master.flat], config), Clip(config.clip_norm)
        """Its learning rate goes along with gradients; the servers take its steps."""

    def predict(self, inputs: DenseInputs) -> Tensor:
        """See `Engine`."""
        with torch.no_grad():
            return self.module(inputs)  # type: ignore[no-any-return]

    def accumulate_only(self, yes: bool) -> None:
        """Does nothing: gradients add up here until they are pushed."""

    def collect(self) -> None:
        """Gives the tables the gradients of the dense part, which their update takes along."""
        self._master.gather_gradients()
        gradient = self._master.flat.grad
        assert gradient is not None
        self.clip([gradient])
        self._tables.dense = gradient.cpu(), self.optimizer.param_groups[0]["lr"]

    def update(self) -> None:
        """Takes over the weights as they are on the servers, this rank's update included."""
        with torch.no_grad():
            self._master.flat.copy_(self._tables.servers.dense())
        self._master.publish()

    def is_finite(self) -> bool:
        """See `Engine`."""
        return all_finite(self._master.flat)

    def weights(self) -> Weights:
        """See `Engine`."""
        self.update()
        return self._master.weights()

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns nothing: servers save weights and moments themselves."""
        return {}

    def restored(self, steps: int) -> None:
        """Takes over the weights that servers have read."""
        self.update()
