"""A server of embedding tables: a process that answers workers until the last one has left.

One thread for each worker receives what it asks, in order; one lock guards the tables, so that pulls and updates
are whole. A worker that breaks its connection without leaving ends the server too; a server of workers that train
on their own goes on without it, unless it was the first, which evaluates. Who watches the processes ends the
attempt in either case, and it goes on from its newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dhen.inputs.held_schema import held_schema
from dhen.model import build_model
from trials.distributed.table_split import take_growing, take_tables
from trials.embeddings.growing import NO_TIME
from trials.job import Job
from trials.optim.master_weights import MasterWeights
from trials.servers.dense_piece import DensePiece
from trials.servers.dispenser import Dispenser, Losses
from trials.servers.messages import DTYPES, Link, LinkBrokenError, Message, Op
from trials.servers.part import Gradients, ServerPart
from trials.servers.shares import Share
from trials.servers.synchrony import Keys, synchronised
from trials.storage.weights_file import Weights
from trials.strategy import ServerLevel

LOG = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker is gone that the others cannot go on without."""


class Server:
    """One of several servers of a training's tables."""

    def __init__(
        self, job: Job, share: Share, workers: int, level: ServerLevel, weights: Weights | None = None
    ) -> None:
        """Makes the server's part of fresh tables, which follow from the job's seed, or of given weights.

        Args:
            job: the job, resolved.
            share: which server this is.
            workers: number of ranks that train.
            level: where rows lie.
            weights: of the whole model; None for fresh ones.
        """
        config = job.training
        torch.manual_seed(job.seed)
        model = build_model(job.model, job.features).train()
        if weights is not None:
            model.load_state_dict(weights)
        tables, rows = take_tables(model), take_growing(model)
        assert tables is not None
        self._lock = threading.Condition()
        schema = held_schema(job.model, job.features)
        self._part = ServerPart(tables, rows, schema, config, share, level, workers)
        self._synchrony = synchronised(config.tables, self._part, workers, self._lock)
        self._alone, self._share, self._workers = config.tables.synchrony == "async", share, workers
        self._dense: DensePiece | None = None
        if self._alone:
            assert config.precision != "auto"
            self._dense = DensePiece(MasterWeights(model, config.precision).flat, share, config)
        self._dispenser = Dispenser(self._lock)
        self._lost: BaseException | None = None
        LOG.info(
            "server %d of %d has %s bytes of rows", share.server, share.servers, f"{self._part.held_bytes:,}"
        )

    def serve(self, store: Any) -> None:
        """Answers workers until all have left.

        Raises:
            WorkerLostError: where one is gone that the others cannot go on without.
        """
        threads = [
            threading.Thread(target=self._answer, args=(store, worker), name=f"worker {worker}", daemon=True)
            for worker in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and self._lost is None:
                thread.join(timeout=0.1)
        if self._lost is not None:
            raise self._lost
        if self._synchrony.lost or self._dispenser.lost:
            LOG.warning(
                "%d updates of rows were left out, whose rows had gone to other ids; %d batches went with their "
                "workers",
                self._synchrony.lost,
                self._dispenser.lost,
            )

    def _answer(self, store: Any, worker: int) -> None:
        try:
            link = Link(store, link_name(worker, self._share.server), server=True)
            while (request := link.receive()).op != Op.LEAVE:
                with self._lock:
                    answer = _ANSWERS[Op(request.op)](self, worker, request)
                if answer is not None:
                    link.send(answer)
            if self._alone and worker == 0:
                with self._lock:
                    self._dispenser.end()
        except LinkBrokenError as error:
            self._gone(worker, error)
        except BaseException as error:  # ours: the process ends with it
            LOG.exception("worker %d", worker)
            self._lost = error

    def _gone(self, worker: int, error: LinkBrokenError) -> None:
        LOG.warning("worker %d is gone: %s", worker, error)
        if self._alone and worker:
            with self._lock:
                self._dispenser.gone(worker)
            return
        self._lost = WorkerLostError(f"worker {worker} is gone")

    def _admit(self, worker: int, request: Message) -> Message:
        time = None if request.number == NO_TIME else request.number
        key_K, table_K, times_K = request.tensors
        rows = self._synchrony.admit(worker, request.step, Keys(key_K, table_K, times_K, time))
        return Message(request.op, tensors=(rows,))

    def _find(self, worker: int, request: Message) -> Message:
        return Message(request.op, tensors=(self._part.find(*request.tensors),))

    def _pull(self, worker: int, request: Message) -> Message:
        dtype = DTYPES[request.number]
        weights, behind = self._synchrony.pull(request.step, request.tensors, dtype)
        return Message(request.op, step=self._part.given, number=behind, tensors=weights)

    def _read(self, worker: int, request: Message) -> Message:
        return Message(request.op, tensors=self._part.read(request.tensors, DTYPES[request.number]))

    def _push(self, worker: int, request: Message) -> None:
        settings, *tensors = request.tensors
        rate, decay, dense_rate, *scales = settings.tolist()
        matrices = len(scales)
        rows, sent, dense = tensors[:matrices], tensors[matrices : 2 * matrices], tensors[2 * matrices :]
        gradients = tuple(values.float().div_(scale) for values, scale in zip(sent, scales, strict=True))
        self._synchrony.push(
            worker, request.step, Gradients(tuple(rows), gradients, rate, decay, read_at=request.number)
        )
        if self._dense is not None:
            (gradient,) = dense
            self._dense.update(gradient, dense_rate)

    def _drain(self, worker: int, request: Message) -> Message:
        self._synchrony.drain(request.step)
        return Message(request.op)

    def _begin_pass(self, worker: int, request: Message) -> None:
        self._part.begin_pass()

    def _dense_weights(self, worker: int, request: Message) -> Message:
        assert self._dense is not None
        return Message(request.op, tensors=(self._dense.weight.clone(),))

    def _next(self, worker: int, request: Message) -> Message:
        (said,) = request.tensors
        rate_factor, loss, steps, clipped = said.tolist()
        until = request.number if worker == 0 else None
        told = self._dispenser.next(worker, until, rate_factor, Losses(loss, int(steps), int(clipped)))
        numbers = torch.tensor([told.rate_factor, *told.losses], dtype=torch.float64)
        return Message(request.op, told.number, told.answer, (numbers, _pairs(told.behind)))

    def _full(self, worker: int, request: Message) -> Message:
        """Rows of a matrix, or, for the number behind those of all, the keys of growing tables."""
        if request.number < len(self._part.names):
            (span,) = request.tensors
            first, most = span.tolist()
            return Message(request.op, tensors=(self._part.rows_from(request.number, first, most),))
        return Message(request.op, tensors=self._part.keys())

    def _export(self, worker: int, request: Message) -> Message:
        dense = self._dense.state() if self._dense is not None else {}
        self._part.save(_path(request), dense)
        return Message(request.op)

    def _import(self, worker: int, request: Message) -> Message:
        if request.tensors:
            files = self._part.load(_path(request))
            if self._dense is not None:
                self._dense.load(files)
        self._synchrony.begin(request.step)
        self._dispenser.begin(request.step)
        return Message(request.op)


def link_name(worker: int, server: int) -> str:
    """Returns the name under which a worker and a server meet."""
    return f"worker{worker}.server{server}"


def path_tensor(path: Path) -> Tensor:
    """Returns a path as it is sent."""
    return torch.tensor(list(os.fsencode(path)), dtype=torch.uint8)


def _path(request: Message) -> Path:
    (sent,) = request.tensors
    return Path(os.fsdecode(bytes(sent.tolist())))


def _pairs(counts: dict[int, int]) -> Tensor:
    return torch.tensor(sorted(counts.items()), dtype=torch.int64).view(-1, 2)


_ANSWERS: dict[Op, Callable[[Server, int, Message], Message | None]] = {
    Op.ADMIT: Server._admit,
    Op.FIND: Server._find,
    Op.PULL: Server._pull,
    Op.READ: Server._read,
    Op.PUSH: Server._push,
    Op.DRAIN: Server._drain,
    Op.BEGIN_PASS: Server._begin_pass,
    Op.DENSE: Server._dense_weights,
    Op.NEXT: Server._next,
    Op.FULL: Server._full,
    Op.EXPORT: Server._export,
    Op.IMPORT: Server._import,
}
