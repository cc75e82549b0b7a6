"""Embedding tables on servers, as a worker trains with them: a lookup pulls rows, an update pushes gradients.

Each row that a batch reads is pulled once, however often it occurs. What is looked up and has gradients is a
matrix of these rows alone. Under `synchrony=semi` with a staleness of one or more the rows of the next batch
are pulled while this one is computed, so that they lack at least the updates of the step at hand.

Shapes: B examples, T tables, U rows, D columns, N keys of a batch, K of them each once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.batch import FeatureBatch
from dhen.inputs.features import TableLookups, Tables, matrices
from dhen.inputs.growing import EMPTY, GrowingRows
from trials.data.loader import LabelledBatch
from trials.optim.adamw import Clip, MasterWeights, adamw, all_finite
from trials.records.job import TrainingConfig
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces
from trials.training.distributed.engine import Engine
from trials.training.embeddings.engine import TableEngine, leaves
from trials.training.embeddings.growing import NewRows
from trials.training.memory_limit import count_on_device
from trials.training.servers.client import ChangedWeights, Servers, StepRows

SENT_IN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PulledRows(TableLookups):
    """The tables of one matrix, of which only the rows of a batch are here."""

    def __init__(self, tables: TableLookups) -> None:
        """The tables of a matrix, without their weights."""
        super().__init__(tables.schema, tables.places)
        self._row_U, self._weight_UD = torch.empty(0, dtype=torch.int64), torch.empty(0, 0)

    def hold(self, row_U: Tensor, weight_UD: Tensor) -> None:
        """Takes over the rows of a batch, in order, and their weights."""
        self._row_U, self._weight_UD = row_U, weight_UD

    def embedded(self, rows_BT: Tensor) -> Tensor:
        """See `TableLookups`."""
        return F.embedding(torch.searchsorted(self._row_U, rows_BT), self._weight_UD)

    def pooled(self, rows: Tensor, offsets_B: Tensor) -> Tensor:
        """See `TableLookups`."""
        return F.embedding_bag(torch.searchsorted(self._row_U, rows), self._weight_UD, offsets_B, mode="mean")


class ServerTables(TableEngine):
    """Tables whose rows are on servers, which save them themselves."""

    def __init__(
        self,
        tables: Tables,
        growing: GrowingRows | None,
        config: TrainingConfig,
        servers: Servers,
        where: torch.device,
    ) -> None:
        """Takes over what tables there are; their weights are the servers'.

        Args:
            tables: the model's, best without rows; those are the servers'.
            growing: what is known of growing ones, the rows of keys apart; None if there are none.
            config: resolved.
            servers: the servers, which have made the same weights from the same seed.
            where: this process's device.
        """
        super().__init__(config)
        self._names = {
            name: (matrix.starts[-1], matrix.weight.shape[1]) for name, matrix in matrices(tables).items()
        }
        self._parts = [PulledRows(matrix) for matrix in matrices(tables).values()]
        self._changed = ChangedWeights(servers, matrices(tables), growing)
        self._growing, self.servers, self._where = growing, servers, where
        self._sent_in = SENT_IN[config.all_to_all_precision]
        self._half = config.table_precision == "fp16"
        self._ahead: tuple[LabelledBatch, Future[tuple[FeatureBatch, StepRows]]] | None = None
        """A batch whose rows were asked for before its step, and what was asked for."""
        self._following: LabelledBatch | None = None
        self._pulls_ahead = config.tables.pulls_ahead
        # of one update per step, and of each worker's own, as much as of all workers together
        self._share = 1.0 if config.tables.synchrony == "async" else 1.0 / servers.workers
        self._decay = config.embedding_decay * self._share
        self.step = 0
        """Number of steps so far."""
        self.behind = Counter[int]()
        """How often rows lacked the updates of so many steps."""
        self._pulled: StepRows | None = None
        self._sent: Future[None] | None = None
        self.dense: tuple[Tensor, float] | None = None
        """Gradients of the dense part, with their learning rate, that the next update takes along."""

    @property
    def staleness(self) -> dict[int, int]:
        """How often rows lacked the updates of so many steps; of ranks on their own, how often so many other
        batches were handed out while one was trained on."""
        return dict(sorted((self.servers.behind or self.behind).items()))

    def ahead(self, batch: LabelledBatch) -> None:
        """Notes the batch after the one whose step comes; its rows may lack the updates of that step."""
        self._following = batch if self._pulls_ahead else None

    def of_batch(self, batch: LabelledBatch) -> FeatureBatch:
        """Returns a batch's inputs with rows in place of keys, after its rows have been pulled."""
        if self._ahead is not None and self._ahead[0] is batch:
            features, self._pulled = self._ahead[1].result()
        else:
            features, self._pulled = self.servers.now(self._asked(batch, self.step))
        self._ahead, following, self._following = None, self._following, None
        if following is not None:
            self._ahead = following, self.servers.later(self._asked(following, self.step + 1))
        self.behind[self._pulled.behind] += 1
        return features

    def lookup(self, features: FeatureBatch, begun: NewRows | None = None) -> tuple[Tensor, ...]:
        """See `TableEngine`; a batch that is trained on has been through `of_batch` before."""
        assert begun is None, "servers begin rows anew themselves"
        features = features.to(torch.device("cpu"))
        if not torch.is_grad_enabled():
            rows = self._rows(features)
            pulled: StepRows = self.servers.now(lambda: self.servers.pull(0, rows, self._sent_in, read=True))
            self._count(pulled)
            return leaves(self._embeddings(features, pulled))
        assert self._pulled is not None
        self._pulled = self._pulled._replace(
            weights=tuple(weight_UD.requires_grad_() for weight_UD in self._pulled.weights)
        )
        self._looked_up = self._embeddings(features, self._pulled)
        return leaves(self._looked_up)

    def update(self, embeddings: tuple[Tensor, ...]) -> None:
        """See `TableEngine`; gradients are on their way when it returns."""
        assert self._pulled is not None
        self._backward(embeddings)
        pulled, self._pulled = self._pulled, None
        gradients = [
            torch.zeros_like(weight_UD) if weight_UD.grad is None else weight_UD.grad.mul_(self._share)
            for weight_UD in pulled.weights
        ]
        step, rate, dense, self.dense = self.step, self._rate, self.dense, None
        self._raise_what_failed()
        self._sent = self.servers.later(
            lambda: self.servers.push(
                step, pulled, gradients, self._sent_in, rate=rate, decay=self._decay, dense=dense
            )
        )
        self.step += 1

    def settle(self) -> None:
        """Waits until all updates are in the tables."""
        self._raise_what_failed()
        self.servers.drain(self.step)

    def full_weights(self) -> dict[str, Tensor] | None:
        """See `TableEngine`."""
        self.settle()
        if self.servers.worker:
            return None
        return {
            name: self.servers.matrix(number, *shape)
            for number, (name, shape) in enumerate(self._names.items())
        }

    def go_on(self, step: int, folder: Path | None) -> None:
        """Goes on after so many steps; the first worker has the servers take over what they saved in a folder."""
        self.step = step
        self.servers.go_on(step, folder)

    def keys(self) -> Tensor | None:
        """Returns the key of each growing row (1 + R), 0 if it is free; None without growing tables."""
        if self._growing is None:
            return None
        return self.servers.keys(len(self._names), len(self._growing.keys))

    def nothing_changed(self) -> None:
        """Has servers tell later of rows that change from now on; of all if they may have rounded some to fp16
        when they took the tables over."""
        if not self._half:
            self.servers.all_told()

    def changed(self, before: Mapping[str, Tensor], prefix: str) -> Weights:
        """Returns what the tables became since an earlier state that has all changes which were returned before,
        see `ChangedWeights`."""
        self.settle()
        return self._changed.since(before, prefix)

    def found(self, features: FeatureBatch) -> FeatureBatch:
        """Returns inputs with rows in place of keys, those that the keys have; to score them."""
        if self._growing is None or features.keys is None:
            return features
        return self.servers.now(lambda: self._with_rows(features, None, None))  # type: ignore[no-any-return]

    def _asked(self, batch: LabelledBatch, step: int) -> Callable[[], tuple[FeatureBatch, StepRows]]:
        """Returns a call of `_request` that knows, in another thread, what counts this rank's memory."""
        return functools.partial(copy_context().run, self._request, batch, step)

    def _request(self, batch: LabelledBatch, step: int) -> tuple[FeatureBatch, StepRows]:
        """Admits a batch's keys and pulls its rows, in the links' thread."""
        while True:
            features, restarts = batch.features, self.servers.restarts
            if self._growing is not None and features.keys is not None:
                features = self._with_rows(features, step, batch.time)
            there = features.to(torch.device("cpu"))
            pulled = self.servers.pull(step, self._rows(there), self._sent_in)
            if pulled.restarts == restarts:  # else the rows of its keys are no longer theirs on one of them
                self._count(pulled)
                return features, pulled

    def _count(self, pulled: StepRows) -> None:
        """Counts rows to this rank's memory, which the links' thread has made; if the device is an accelerator
        they are not on it."""
        if self._where.type == "cpu":
            count_on_device([*pulled.rows, *pulled.weights])

    def _with_rows(self, features: FeatureBatch, step: int | None, time: int | None) -> FeatureBatch:
        """Returns inputs with rows in place of keys, which a step counts."""
        assert self._growing is not None
        assert features.keys is not None
        key_N, table_N = self._growing.salted(features.keys), self._growing.table_of(features.keys)
        key_K, place_N, times_K = torch.unique(key_N, return_inverse=True, return_counts=True)
        table_K = torch.empty_like(key_K).scatter_(0, place_N, table_N)
        given_K = key_K != EMPTY
        row_K = torch.zeros_like(key_K)
        counted = times_K[given_K] if step is not None else None
        row_K[given_K] = self.servers.rows_of_keys(key_K[given_K], table_K[given_K], counted, step or 0, time)
        return self._growing.with_rows(features, row_K[place_N])

    def _rows(self, features: FeatureBatch) -> list[Tensor]:
        return [torch.unique(part.rows(features)) for part in self._parts]

    def _embeddings(self, features: FeatureBatch, pulled: StepRows) -> list[Tensor]:
        looked_up = []
        for part, row_U, weight_UD in zip(self._parts, pulled.rows, pulled.weights, strict=True):
            part.hold(row_U, weight_UD)
            looked_up += [embedding.to(self._where) for embedding in part(features)]
        return looked_up

    def _raise_what_failed(self) -> None:
        """Waits for the last push to be sent, and raises what it met."""
        if self._sent is not None:
            self._sent.result()


# The dense part of a rank that trains on its own, whose weights are on the servers of the tables.
#
# The rank computes with a copy. After backward its gradients go to the servers with those of the rows, and the
# weights come back as all ranks' updates have made them (Downpour SGD, NIPS 2012).


class ServedDense(Engine):
    """The engine of dp on servers."""

    def __init__(self, model: nn.Module, config: TrainingConfig, tables: ServerTables) -> None:
        """Takes a model over whose tables were taken, with the weights that the servers have made too."""
        assert config.precision != "auto"
        self.module, self._tables = model, tables
        self._master = MasterWeights(model, config.precision)
        self.optimizer, self.clip = adamw([self._master.flat], config), Clip(config.clip_norm)
        """Its learning rate goes along with gradients; the servers take its steps."""

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
