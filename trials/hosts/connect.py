"""The connection to a Ray cluster, which its owner has started and keeps; every failure is one sentence.

What Ray keeps internal (where it looks for a running cluster, how long it tries) is named here alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec

from dhen.errors import UserError
from trials.address import RAY_CLIENT, SLURM, host_and_port, is_loopback
from trials.hosts.head import Head
from trials.hosts.slurm import cluster_of_the_job

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
        UserError: without Ray, without a cluster there, or where the cluster takes this process not in (another
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
    """Returns what nobody has reserved of each node (`CPU`, `GPU`), by the node's id; empty where Ray does not
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
        UserError: where there is none.
    """
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise UserError(f"launcher={launcher}: no Ray cluster runs on this machine; {START}.") from None


def _check_reached(launcher: str, address: str) -> None:
    """Checks that somebody listens there: Ray itself would try for minutes.

    Raises:
        UserError: where nobody does, or the address is none.
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
