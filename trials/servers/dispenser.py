"""Hands out batches to workers that train on their own (`synchrony=async`), one after another, by number.

Workers that are fast take more of them. At the step where an evaluation is due no more are handed out until all
that were are done, so that points of a curve are at the same numbers of examples as in any other training. Who
asks says thereby that its last batch is done; one that is gone takes its batch with it, and one that takes its
place is handed the next.

A server that comes back in the place of the first is told by workers, as they connect, how far they are: it may
hand out a batch twice that a worker has which has not connected yet.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import NamedTuple

import torch

from trials.servers.messages import Message, Op


class Answer(IntEnum):
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


class Told(NamedTuple):
    """What a worker is told, and what others have reported."""

    answer: Answer
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


def told_in(message: Message) -> Told:
    """Returns what a worker is told with a message."""
    numbers, behind = message.tensors
    factor, loss, steps, clipped, lost = numbers.tolist()
    losses = Losses(loss, int(steps), int(clipped))
    return Told(Answer(message.number), message.step, factor, losses, dict(behind.tolist()), int(lost))


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

    def next(self, connection: int, until: int | None, rate_factor: float, done: Losses) -> Told:
        """Returns what a worker is to do next.

        Args:
            connection: that of who asks, and is done with what it had.
            until: given by the first worker, which evaluates: the number of batches after which the next
                evaluation is due. It is told so when all of them are done; others wait.
            rate_factor: as the first worker has it.
            done: of the batch that it had.
        """
        self._done(connection, done)
        if until is not None:
            self._until, self._rate_factor = max(self._until, until), rate_factor
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._next < self._until or not self._held)
        else:
            self._lock.wait_for(lambda: self._next < self._until or self._ended)
        if self._ended:
            return self._told(Answer.END, self._next)
        if self._next == self._until:
            told = self._told(Answer.EVALUATE, self._next)
            self._losses = Losses(0.0, 0, 0)
            return told
        self._held[connection] = self._next
        self._next += 1
        return self._told(Answer.TRAIN, self._next - 1)

    def end(self) -> None:
        """Ends the training for all workers."""
        self._ended = True
        self._lock.notify_all()

    def gone(self, connection: int) -> None:
        """Notes that a worker is gone, with the batch that it had."""
        self.lost += self._held.pop(connection, None) is not None
        self._lock.notify_all()

    def _told(self, answer: Answer, number: int) -> Told:
        return Told(answer, number, self._rate_factor, self._losses, dict(self._behind), self.lost)

    def _done(self, connection: int, done: Losses) -> None:
        number = self._held.pop(connection, None)
        if number is not None:
            total, steps, clipped = self._losses
            self._losses = Losses(total + done.total, steps + done.steps, clipped + done.clipped)
            behind = self._next - 1 - number
            self._behind[behind] = self._behind.get(behind, 0) + 1
            self._lock.notify_all()
