"""How the ranks of a candidate find each other: by a file in the trial's directory, or at one host's address.

Gloo between CPUs, NCCL between CUDA devices. On one machine gloo speaks over the loopback interface alone:
its own choice, the address of the machine's name, need not exist in a container.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dhen.errors import UserError
from trials.address import host_and_port, is_loopback
from trials.events import RENDEZVOUS, SERVERS_RENDEZVOUS
from trials.ranks import Ranks

LOG = logging.getLogger(__name__)
MEETING_SECONDS = 600.0
"""Seconds that ranks and servers wait for each other to begin."""


def join(ranks: Ranks, folder: Path, address: str | None, *, seconds: float) -> None:
    """Lets this process, whose CUDA device is set where it has one, join the process group of all ranks; waits for
    the others.

    Args:
        ranks: where this process stands.
        folder: the trial's directory, seen by all ranks; used where there is no address.
        address: where the ranks of several machines meet.
        seconds: time after which a collective that waits for a rank fails; also for this call.
    """
    began, timeout = time.monotonic(), datetime.timedelta(seconds=seconds)
    store = None
    if not address:  # not by file://, which ends at a blank or a # of the path
        store = dist.FileStore(str(folder / RENDEZVOUS), ranks.world)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
    _speak_over_loopback(address)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{address}" if address else None,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=timeout,
    )
    meeting = f"at {address}" if address else "by a file"
    LOG.info("process group of %d ranks made %s in %.2f s", ranks.world, meeting, time.monotonic() - began)


def meeting_of_servers(folder: Path, address: str | None, *, makes: bool) -> Any:
    """Returns the store through which ranks and servers of tables find each other.

    Args:
        folder: the trial's directory, seen by all; used where there is no address.
        address: where the ranks of several machines meet.
        makes: whether this process makes the store at that address; the first rank of a process group has made it.
    """
    _speak_over_loopback(address)
    if not address:
        return dist.FileStore(str(folder / SERVERS_RENDEZVOUS), -1)  # type: ignore[attr-defined]
    host, port = host_and_port(address)
    timeout = datetime.timedelta(seconds=MEETING_SECONDS)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=makes, timeout=timeout, wait_for_workers=False
    )


def _speak_over_loopback(address: str | None) -> None:
    if sys.platform == "linux" and (address is None or is_loopback(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def visible_devices() -> tuple[str, ...]:
    """Returns the ids of the CUDA devices that this process may use, as `CUDA_VISIBLE_DEVICES` has them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return tuple(named[:count] if len(named) >= count else map(str, range(count)))


def check_devices(ranks_here: int) -> None:
    """Checks that a machine with CUDA devices has one for each rank.

    Raises:
        UserError: when the machine has fewer.
    """
    devices = len(visible_devices())
    if devices and ranks_here > devices:
        raise UserError(
            f"the plan wants {ranks_here} ranks on this machine, which has {devices} CUDA device(s); a rank "
            f"needs a device of its own: give ranks=1x{devices}, or a cluster with as many."
        )
