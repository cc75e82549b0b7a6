"""The connection to a Ray cluster, which its owner has started and keeps; every failure is one sentence.

What Ray keeps internal (where it looks for a running cluster, how long it tries) is named here alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import TypeVar

from dhen.errors import EXIT_CODE, UserError
from trials.records.places import RAY_CLIENT, SLURM, host_and_port, is_loopback
from trials.runtime.hosts.slurm import cluster_of_the_job

# Questions to the head of a Ray cluster, which leaves them without an answer once it is gone.
#
# Ray itself waits for the head and then ends the process, with a message of its own, whatever the process is
# about. So each question has a thread, another one asks now and then whether the head is there, and a head that
# has not answered for most of that time is given up: in time for a sentence, and for the study's end.

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
            HeadGoneError: if it does not answer, and at once for each question after that.
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
        """A context in which the head is asked all the time. If it is gone and nobody asks anything else, which
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


LOG = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0
TRIES = 1
"""Number of times that Ray asks a server that does not answer as one of its own; each takes most of a minute."""
START = (
    "start one with `ray start --head` on the first machine and `ray start --address=HOST:6379` on each of the "
    "others, or name one: RAY_ADDRESS=HOST:6379, or launcher=ray://HOST:10001 for Ray's client"
)
TOKEN = (
    "where the cluster asks for a token, RAY_AUTH_MODE=token and the same token must be here too (RAY_AUTH_TOKEN, "
    "or the file ~/.ray/auth_token)"
)


@contextlib.contextmanager
def connected(launcher: str) -> Iterator[Head]:
    """Connects this process to the Ray cluster that `launcher` means, and gives the cluster's head.

    Args:
        launcher: `ray` for the cluster that RAY_ADDRESS names, else the one that runs on this machine;
            `ray://HOST:PORT` for Ray's client; `slurm` for one that is made on the nodes of this Slurm job.

    Raises:
        UserError: without Ray, without a cluster there, or if the cluster takes this process not in (another
            version of Ray or Python, another token).
    """
    if find_spec("ray") is None:
        raise UserError(f"launcher={launcher} needs Ray: pip install 'dhen-search[ray]'.")
    if launcher == SLURM:  # Ray reads the environment when it is imported
        with cluster_of_the_job() as of_job, _connected(launcher) as head:
            of_job.wait_for_nodes(_nodes_alive)
            yield head
    else:
        with _connected(launcher) as head:
            yield head


@contextlib.contextmanager
def _connected(launcher: str) -> Iterator[Head]:
    import ray
    from ray._private import ray_constants

    address = launcher if launcher.startswith(RAY_CLIENT) else _running(launcher)
    _check_reached(launcher, address)
    ray_constants.NUM_REDIS_GET_RETRIES = TRIES
    if not address.startswith(RAY_CLIENT) and is_loopback(address):
        # Ray would put the machine's own address in place of 127.0.0.1, where a cluster that is for this machine
        # alone does not listen
        ray_constants.ENABLE_RAY_CLUSTER = False
    LOG.info("Ray %s: connects to %s", ray.__version__, address)
    answer_to_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError, ImportError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        hint = "" if "ersion mismatch" in said else f"; {TOKEN}"
        where = "" if address == launcher else f" {address}:"
        raise UserError(f"launcher={launcher}:{where} {said}{hint}.") from None
    # Ray ends a driver at once, without a word of what was going on
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, answer_to_sigterm)
    head = Head()
    try:
        with head.watched(ray.nodes):
            yield head
    finally:
        if head.is_gone:  # it would be waited for here, and once more as this process ends
            atexit.unregister(ray.shutdown)
        else:
            ray.shutdown()


def free_on_nodes() -> dict[str, dict[str, float]]:
    """Returns what nobody has reserved of each node (`CPU`, `GPU`), by the node's id; empty if Ray does not
    say, as through its client."""
    from ray._private.state import available_resources_per_node

    with contextlib.suppress(Exception):
        return dict(available_resources_per_node())
    return {}


def _nodes_alive() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def _running(launcher: str) -> str:
    """Returns the address of the cluster that RAY_ADDRESS names, else of the one that was started on this machine.

    Raises:
        UserError: if there is none.
    """
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise UserError(f"launcher={launcher}: no Ray cluster runs on this machine; {START}.") from None


def _check_reached(launcher: str, address: str) -> None:
    """Checks that somebody listens there: Ray itself would try for minutes.

    Raises:
        UserError: if nobody does, or the address is none.
    """
    try:
        place = host_and_port(address.removeprefix(RAY_CLIENT))
        socket.create_connection(place, timeout=CONNECT_SECONDS).close()
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"launcher={launcher}: no Ray cluster answers at {address} ({reason}); {START}."
        ) from None


def token_is_asked_for() -> bool:
    """Tells whether Ray asks who speaks to this process for the cluster's token (RAY_AUTH_MODE=token)."""
    from ray import _raylet

    mode = _raylet.get_authentication_mode()  # type: ignore[attr-defined]
    return bool(mode == _raylet.AuthenticationMode.TOKEN)  # type: ignore[attr-defined]


# What all hosts of a study must have alike, as this host has it.


@cache
def versions_here() -> dict[str, str]:
    """Returns the versions of what makes a training the same everywhere."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"dhen-search": version("dhen-search"), "torch": version("torch"), "python": python}


@cache
def devices_here() -> int | None:
    """Returns the number of CUDA devices; None if ranks train on the CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else None
