"""A server of embedding tables: a process that answers workers until the last one has left.

One thread for each worker that calls receives what it asks, in order; one lock guards the tables, so that
pulls and updates are whole. A worker that breaks its connection without leaving ends the server too; a server
of workers that train on their own goes on without it, unless it was the first, which evaluates, and takes the
call of another one in its place.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dhen.inputs.growing import part_of_tables
from dhen.inputs.lift import held_schema
from dhen.model import build_model
from trials.optim.adamw import MasterWeights, adamw, moments, set_steps
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import ServerLevel, rank_slice
from trials.store.weights import Weights, with_own
from trials.training.distributed.engine import TABLES, take_growing, take_tables
from trials.training.embeddings.blocks import State
from trials.training.embeddings.growing import NO_TIME
from trials.training.servers.connection import LOOK_SECONDS, Calls
from trials.training.servers.messages import DTYPES, LinkBrokenError, Message, Op, ServerLink, Share
from trials.training.servers.part import ROWS_AT_ONCE, Gradients, ServerPart
from trials.training.servers.synchrony import BatchKeys, synchronised

# Hands out batches to workers that train on their own (`synchrony=async`), one after another, by number.
#
# Workers that are fast take more of them. At the step where an evaluation is due no more are handed out until
# all that were are done, so that points of a curve are at the same numbers of examples as in any other training.
# Who asks says thereby that its last batch is done; one that is gone takes its batch with it, and one that takes
# its place is handed the next.
#
# A server that comes back in the place of the first is told by workers, as they connect, how far they are: it
# may hand out a batch twice that a worker has which has not connected yet.


class BatchAnswer(IntEnum):
    """What a worker that asks for a batch is told."""

    TRAIN = 0
    EVALUATE = 1
    END = 2


class Losses(NamedTuple):
    """What some batches came to."""

    total: float
    """Sum of their losses."""
    steps: int
    """Their number."""
    clipped: int
    """Number of them whose gradients were clipped."""


class BatchGrant(NamedTuple):
    """What a worker is told, and what others have reported."""

    answer: BatchAnswer
    number: int
    """Number of the batch to train on; else of the batches so far."""
    rate_factor: float
    """Factor of learning rates that plateaus have left, as the first worker has it."""
    losses: Losses
    """For an evaluation: what all batches since the one before came to."""
    behind: dict[int, int]
    """How often a batch was trained on while so many others were handed out."""
    lost: int
    """Number of batches that went with their worker."""

    @property
    def message(self) -> Message:
        """The same as it is sent."""
        numbers = torch.tensor([self.rate_factor, *self.losses, self.lost], dtype=torch.float64)
        behind = torch.tensor(sorted(self.behind.items()), dtype=torch.int64).view(-1, 2)
        return Message(Op.NEXT, self.number, self.answer, (numbers, behind))


def told_in(message: Message) -> BatchGrant:
    """Returns what a worker is told with a message."""
    numbers, behind = message.tensors
    factor, loss, steps, clipped, lost = numbers.tolist()
    losses = Losses(loss, int(steps), int(clipped))
    return BatchGrant(
        BatchAnswer(message.number), message.step, factor, losses, dict(behind.tolist()), int(lost)
    )


class Dispenser:
    """The numbers of the batches; methods are called with the server's lock held."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._next, self._until, self._ended = 0, 0, False
        self._held = dict[int, int]()
        """The batch of each connection of a worker that has one."""
        self._losses, self._rate_factor = Losses(0.0, 0, 0), 1.0
        self.lost = 0
        """Number of batches that went with their worker."""
        self._behind = dict[int, int]()

    def begin(self, step: int) -> None:
        """Goes on after so many batches."""
        self._next = self._until = step

    def hear(self, connection: int, handed_out: int, *, holds_last: bool) -> None:
        """Notes how far a worker is that connects: how many batches were handed out as far as it knows, and
        whether it has the last of them."""
        if handed_out > self._next:
            self._next = self._until = handed_out
        if holds_last:
            self._held[connection] = handed_out - 1

    def next(self, connection: int, until: int | None, rate_factor: float, done: Losses) -> BatchGrant:
        """Returns what a worker is to do next.

        Args:
            connection: that of who asks, and is done with what it had.
            until: given by the first worker, which evaluates: the number of batches after which the next
                evaluation is due. It is told so when all of them are done; others wait.
            rate_factor: as the first worker has it.
            done: of the batch that it had.
        """
        number = self._held.pop(connection, None)
        if number is not None:
            total, steps, clipped = self._losses
            self._losses = Losses(total + done.total, steps + done.steps, clipped + done.clipped)
            behind = self._next - 1 - number
            self._behind[behind] = self._behind.get(behind, 0) + 1
            self._lock.notify_all()
        if until is not None:
            self._until, self._rate_factor = max(self._until, until), rate_factor
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._next < self._until or not self._held)
        else:
            self._lock.wait_for(lambda: self._next < self._until or self._ended)
        if self._ended:
            return self._told(BatchAnswer.END, self._next)
        if self._next == self._until:
            told = self._told(BatchAnswer.EVALUATE, self._next)
            self._losses = Losses(0.0, 0, 0)
            return told
        self._held[connection] = self._next
        self._next += 1
        return self._told(BatchAnswer.TRAIN, self._next - 1)

    def end(self) -> None:
        """Ends the training for all workers."""
        self._ended = True
        self._lock.notify_all()

    def gone(self, connection: int) -> None:
        """Notes that a worker is gone, with the batch that it had."""
        self.lost += self._held.pop(connection, None) is not None
        self._lock.notify_all()

    def _told(self, answer: BatchAnswer, number: int) -> BatchGrant:
        return BatchGrant(answer, number, self._rate_factor, self._losses, dict(self._behind), self.lost)


# The dense part of a model on servers, for workers that train on their own: each server has a piece of it.
#
# All dense weights lie one after another (`trials.optim.adamw`), and server k of N has the k-th of N pieces that
# are equal up to one. A worker pulls all pieces, computes, and pushes the gradients of each; the server's AdamW
# updates its piece from each push on its own (Downpour SGD, NIPS 2012, with AdamW in place of SGD).

DENSE, STEPS = "dense.", "dense.steps"
"""Names in a server's file: of weights and moments, and of the number of updates."""


def piece(numbers: int, share: Share) -> slice:
    """Returns which of so many dense weights a server has."""
    return rank_slice(numbers, share.server, share.servers)


class DensePiece:
    """A server's piece of the dense weights, with AdamW's moments."""

    def __init__(self, flat: Tensor, share: Share, config: TrainingConfig) -> None:
        """Keeps its piece of all dense weights, in fp32."""
        self._share = share
        self._piece = nn.Parameter(flat.detach()[piece(len(flat), share)].clone())
        self._optimizer = adamw([self._piece], config)
        self._steps = 0

    @property
    def weight(self) -> Tensor:
        """The weights, in fp32."""
        return self._piece.detach()

    def update(self, gradient: Tensor, rate: float) -> None:
        """Runs AdamW on a gradient of the piece."""
        self._piece.grad = gradient.clone()
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._piece.grad = None
        self._steps += 1

    def state(self) -> Weights:
        """Returns weights and moments, to save."""
        vectors = {"weight": self.weight, **moments(self._optimizer, self._piece)}
        named = {f"{DENSE}{name}": values for name, values in vectors.items()}
        return named | {STEPS: torch.tensor(self._steps)}

    @torch.no_grad()
    def load(self, files: Sequence[Weights]) -> None:
        """Takes over what servers have saved, however many they were."""
        self._steps = int(files[0][STEPS])
        for name, values in self.state().items():
            if name != STEPS:
                whole = torch.cat([file[name] for file in files])
                values.copy_(whole[piece(len(whole), self._share)])
        set_steps(self._optimizer, self._piece, self._steps)


LOG = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker is gone that the others cannot go on without."""


class Server:
    """One of several servers of a training's tables."""

    def __init__(
        self,
        job: Job,
        share: Share,
        workers: int,
        level: ServerLevel,
        weights: Weights | None = None,
        learnt: State | None = None,
    ) -> None:
        """Makes the server's part of fresh tables, which follow from the job's seed, or of given weights.

        Args:
            job: the job, resolved.
            share: which server this is.
            workers: number of ranks that train.
            level: where rows lie.
            weights: of the whole model, best mapped from a file; None for fresh ones.
            learnt: the tables' optimizer state, as `ServerPart` takes it; None for a fresh one.
        """
        config = job.training
        torch.manual_seed(job.seed)
        with part_of_tables(share.server if weights is None else None, share.servers):
            model = build_model(job.model, job.features).train()
        given = None
        if weights is not None:
            model.load_state_dict(with_own(model, weights, TABLES))
            given = {name.removeprefix(TABLES): weights[name] for name in weights if name.startswith(TABLES)}
        tables, rows = take_tables(model), take_growing(model)
        assert tables is not None
        self._lock = threading.Condition()
        schema = held_schema(job.model, job.features)
        self._part = ServerPart(tables, rows, schema, config, share, level, workers, given, learnt)
        self._synchrony = synchronised(config.tables, self._part, workers, self._lock)
        self._alone, self._share, self._workers = config.tables.synchrony == "async", share, workers
        self._dense: DensePiece | None = None
        if self._alone:
            assert config.precision != "auto"
            self._dense = DensePiece(MasterWeights(model, config.precision).flat, share, config)
        self._dispenser = Dispenser(self._lock)
        self._lost: BaseException | None = None
        self._came_back_at = -1
        """Number of steps after which it goes on in the place of another; -1 for the first one."""
        self._left = set[int]()
        """Workers that have ended well."""
        self._connected = dict[int, int]()
        """The worker of each connection, by its number."""
        LOG.info(
            "server %d of %d has %s bytes of rows", share.server, share.servers, f"{self._part.held_bytes:,}"
        )

    def go_on(self, steps: int, folder: Path) -> None:
        """Goes on in the place of a server that was killed, from what all have saved in a folder after so many
        steps.

        Raises:
            UserError: if files are missing or damaged.
        """
        self._begin(steps, folder)
        self._came_back_at = steps
        LOG.info("server %d goes on from %s", self._share.server, folder)

    def serve(self, store: Any, restarts: int = 0) -> None:
        """Answers workers until all have left.

        Args:
            store: where both sides meet.
            restarts: how often the server was started anew before.

        Raises:
            WorkerLostError: if one is gone that the others cannot go on without.
        """
        calls, numbers = Calls(store, self._share.server, restarts), itertools.count()
        while self._lost is None and not self._is_done():
            for name in calls.new():
                number = next(numbers)
                thread = threading.Thread(target=self._answer, args=(store, name, number), daemon=True)
                thread.start()
            time.sleep(LOOK_SECONDS)
        if self._lost is not None:
            raise self._lost
        if self._synchrony.lost or self._dispenser.lost:
            LOG.warning(
                "%d updates of rows were left out, whose rows had gone to other ids; %d batches went with their "
                "workers",
                self._synchrony.lost,
                self._dispenser.lost,
            )

    def _is_done(self) -> bool:
        """Tells whether all workers have left; of those on their own the first, and all that are connected."""
        if self._alone:
            return 0 in self._left and not self._connected
        return len(self._left) == self._workers

    def _answer(self, store: Any, name: str, number: int) -> None:
        """Answers a worker that calls, until it leaves or is gone; `number` is that of its connection."""
        try:
            link = ServerLink(store, name, server=True)
            request = link.receive()
        except LinkBrokenError as error:  # it was killed while it called, or calls again
            LOG.warning("a call was not taken: %s", error)
            return
        worker = request.number
        with self._lock:
            self._connected[number] = worker
        try:
            while request.op != Op.LEAVE:
                with self._lock:
                    answer = self._response(worker, number, request)
                if answer is not None:
                    link.send(answer)
                request = link.receive()
            self._left.add(worker)
            if self._alone and worker == 0:
                with self._lock:
                    self._dispenser.end()
        except LinkBrokenError as error:
            LOG.warning("worker %d is gone: %s", worker, error)
            if self._alone and worker:
                with self._lock:
                    self._dispenser.gone(number)
            else:
                self._lost = WorkerLostError(f"worker {worker} is gone")
        except BaseException as error:  # ours: the process ends with it
            LOG.exception("worker %d", worker)
            self._lost = error
        finally:
            with self._lock:
                self._connected.pop(number, None)

    def _response(self, worker: int, connection: int, request: Message) -> Message | None:
        """Does what a worker asks for; returns the answer, None if it waits for none. The lock is held."""
        part, step, number, tensors = self._part, 0, 0, tuple[Tensor, ...]()
        match Op(request.op):
            case Op.HELLO:
                for earlier, its in list(self._connected.items()):
                    # a link that is broken, which gloo may have missed
                    if its == worker and earlier != connection:
                        self._dispenser.gone(earlier)
                        del self._connected[earlier]
                handed_out, holds_last = request.tensors[0].tolist()
                self._synchrony.hear(worker, request.step)
                self._dispenser.hear(connection, handed_out, holds_last=bool(holds_last))
                step = self._came_back_at
            case Op.ADMIT:
                key_K, table_K, times_K = request.tensors
                keys = BatchKeys(
                    key_K, table_K, times_K, None if request.number == NO_TIME else request.number
                )
                tensors = (self._synchrony.admit(worker, request.step, keys),)
            case Op.FIND:
                tensors = (part.find(*request.tensors),)
            case Op.PULL:
                tensors, number = self._synchrony.pull(request.step, request.tensors, DTYPES[request.number])
                step = part.given
            case Op.READ:
                tensors = part.read(request.tensors, DTYPES[request.number])
            case Op.PUSH:
                settings, *sent = request.tensors
                rate, decay, dense_rate, *scales = settings.tolist()
                count = len(scales)
                scaled = zip(sent[count : 2 * count], scales, strict=True)
                gradients = tuple(values.float().div_(scale) for values, scale in scaled)
                pushed = Gradients(tuple(sent[:count]), gradients, rate, decay, read_at=request.number)
                self._synchrony.push(worker, request.step, pushed)
                if self._dense is not None:
                    self._dense.update(sent[2 * count], dense_rate)
                return None
            case Op.DRAIN:
                self._synchrony.drain(request.step)
            case Op.BEGIN_PASS:
                part.begin_pass()
                return None
            case Op.DENSE:
                assert self._dense is not None
                tensors = (self._dense.weight.clone(),)
            case Op.NEXT:
                rate_factor, loss, steps, clipped = request.tensors[0].tolist()
                until = request.number if worker == 0 else None
                done = Losses(loss, int(steps), int(clipped))
                return self._dispenser.next(connection, until, rate_factor, done).message
            case Op.FULL if request.number < len(part.names):
                first, most = request.tensors[0].tolist()
                tensors = (part.rows_from(request.number, first, most),)
            case Op.FULL:  # the number behind those of all matrices
                tensors = part.keys()
            case Op.CHANGED if request.number < 0:
                part.all_told()
            case Op.CHANGED:
                tensors = part.changed(request.number, ROWS_AT_ONCE)
                number = int(len(tensors[0]) == ROWS_AT_ONCE)
            case Op.EXPORT:
                part.save(_path(request), self._dense.state() if self._dense is not None else {})
            case Op.IMPORT:
                self._begin(request.step, _path(request) if request.tensors else None)
        return Message(request.op, step, number, tensors)

    def _begin(self, steps: int, folder: Path | None) -> None:
        """Goes on after so many steps, from what servers have saved in a folder, or from what is here."""
        if folder is not None:
            files = self._part.load(folder)
            if self._dense is not None:
                self._dense.load(files)
        self._synchrony.begin(steps)
        self._dispenser.begin(steps)


def path_tensor(path: Path) -> Tensor:
    """Returns a path as it is sent."""
    return torch.tensor(list(os.fsencode(path)), dtype=torch.uint8)


def _path(request: Message) -> Path:
    (sent,) = request.tensors
    return Path(os.fsdecode(bytes(sent.tolist())))
