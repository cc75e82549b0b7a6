"""Questions to the head of a Ray cluster, which leaves them without an answer once it is gone.

Ray itself waits for the head and then ends the process, with a message of its own, whatever the process is about.
So each question has a thread, another one asks now and then whether the head is there, and a head that has not
answered for most of that time is given up: in time for a sentence, and for the study's end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from dhen.errors import EXIT_CODE

T = TypeVar("T")
RAYS_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The environment's variable for the seconds after which Ray ends a process whose head does not answer."""
RAYS_SECONDS = 60.0
"""What it is unless set."""
SHARE, LAST_SHARE = 0.75, 0.9
"""Shares of these seconds after which the head is given up, and after which a process that is about something else
ends itself."""
BEAT_SECONDS = 2.0
"""Seconds between two questions whether the head is there."""


class HeadGoneError(Exception):
    """The head of the cluster does not answer, and nothing can be asked of Ray in this process any more.

    It is no `UserError`: who goes on without what a user got wrong cannot go on without the cluster.
    """


class Head:
    """The head of the cluster that this process is connected to."""

    def __init__(self) -> None:
        """A head that is there, as far as is known."""
        self._gone: HeadGoneError | None = None
        self._answered: float | None = None
        """When it has last answered who watches it; None while nobody does."""

    @property
    def is_gone(self) -> bool:
        """Whether it was given up; nothing is asked of it any more."""
        return self._gone is not None

    def ask(self, question: Callable[[], T]) -> T:
        """Returns what the head answers to a question, a call of Ray's.

        Raises:
            HeadGoneError: where it does not answer, and at once for each question after that.
        """
        if self._gone is not None:
            raise self._gone
        answer: Future[T] = Future()
        threading.Thread(target=_answer, args=(question, answer), daemon=True).start()
        asked, patience = time.monotonic(), SHARE * _rays_seconds()
        try:
            while True:
                left = patience - (time.monotonic() - (self._answered or asked))
                if left <= 0.0:
                    break
                try:
                    return answer.result(min(left, BEAT_SECONDS))
                except TimeoutError:
                    if answer.done():  # the question's own
                        raise
        except ConnectionError as error:  # of Ray's client
            self._gone = _gone(f"has gone ({' '.join(str(error).split())})")
        else:
            self._gone = _gone(_silent_for(patience))
        raise self._gone

    @contextmanager
    def watched(self, question: Callable[[], object]) -> Iterator[None]:
        """A context in which the head is asked all the time. Where it is gone and nobody asks anything else, which
        would tell, this process ends with a sentence, before Ray ends it without."""
        ended = threading.Event()
        self._answered = time.monotonic()
        beats = threading.Thread(target=self._beat, args=(question, ended), daemon=True)
        beats.start()
        threading.Thread(target=self._watch, args=(ended,), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            if not self.is_gone:
                beats.join(BEAT_SECONDS)

    def _beat(self, question: Callable[[], object], ended: threading.Event) -> None:
        while not ended.wait(BEAT_SECONDS):
            try:
                question()
            except Exception:
                continue  # as if it had not answered
            self._answered = time.monotonic()

    def _watch(self, ended: threading.Event) -> None:
        patience = LAST_SHARE * _rays_seconds()
        while not ended.wait(min(1.0, patience / 10)):
            silent = time.monotonic() - (self._answered or time.monotonic())
            if silent > patience:
                print(f"dhen-search: {self._gone or _gone(_silent_for(silent))}", file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)


def _rays_seconds() -> float:
    return float(os.environ.get(RAYS_SETTING) or RAYS_SECONDS)


def _silent_for(seconds: float) -> str:
    longer = f"{RAYS_SETTING}, on all nodes and here, has it waited for longer"
    return f"has not answered for {seconds:.0f} s ({longer})"


def _gone(why: str) -> HeadGoneError:
    return HeadGoneError(
        f"the head of the Ray cluster {why}. What had ended is in the study; the same command goes on from the "
        "newest checkpoints once there is a cluster again."
    )


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
