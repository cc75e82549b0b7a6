"""How the ranks of a candidate find each other: by a file in the trial's directory, or at one host's address.

Gloo between CPUs, NCCL between CUDA devices. On one machine gloo speaks over the loopback interface alone:
its own choice, the address of the machine's name, need not exist in a container.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import AfterValidator

from dhen.errors import UserError
from trials.events import RENDEZVOUS
from trials.ranks import Ranks

PORTS = range(1, 2**16)


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) not in PORTS:
        raise ValueError("expected host:port of the first host, such as 10.0.0.1:29500")
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""`host:port` where the first rank waits for all others."""


def join(ranks: Ranks, folder: Path, address: str | None, *, local: int, seconds: float) -> None:
    """Makes this process a member of the process group of all ranks; waits for the others.

    Args:
        ranks: where this process stands.
        folder: the trial's directory, seen by all ranks; used where there is no address.
        address: where the ranks of several machines meet.
        local: which CUDA device of this machine is its own.
        seconds: after which a collective that waits for a rank fails; also for this call.
    """
    method = f"tcp://{address}" if address else (folder / RENDEZVOUS).absolute().as_uri()
    if sys.platform == "linux" and (address is None or _is_loopback(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=method,
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=datetime.timedelta(seconds=seconds),
    )


def check_devices(ranks_here: int) -> None:
    """A machine with CUDA devices has one for each rank.

    Raises:
        UserError: when it has fewer.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else None
    if devices is not None and ranks_here > devices:
        raise UserError(
            f"the plan wants {ranks_here} ranks on this machine, which has {devices} CUDA device(s); a rank "
            f"needs a device of its own: give ranks=1x{devices}, or a cluster with as many."
        )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
