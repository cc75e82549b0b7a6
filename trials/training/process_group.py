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
from torch import Tensor

from dhen.errors import UserError
from trials.cluster.machine import device
from trials.records.events import RENDEZVOUS, SERVERS_RENDEZVOUS
from trials.records.places import host_and_port, is_loopback
from trials.records.strategy import Ranks

LOG = logging.getLogger(__name__)
MEETING_SECONDS = 600.0
"""Seconds that ranks and servers wait for each other to begin."""


def join(ranks: Ranks, folder: Path, address: str | None, *, seconds: float) -> None:
    """Lets this process, whose CUDA device is set if it has one, join the process group of all ranks; waits for
    the others.

    Args:
        ranks: where this process stands.
        folder: the trial's directory, seen by all ranks; used if there is no address.
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
        folder: the trial's directory, seen by all; used if there is no address.
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


# Small collectives beside the training itself: means, rank 0's numbers, parts of a vector.
#
# With them all ranks decide alike. One rank asks nobody.
#
# Shapes: N rows of a part, C columns.


def mean_over(ranks: Ranks, values: Tensor) -> Tensor:
    """Returns the mean of all ranks' values, element by element; a collective."""
    if ranks.world > 1:
        dist.all_reduce(values)
        values = values / ranks.world
    return values


def all_agree(ranks: Ranks, holds_here: bool) -> bool:
    """Tells whether `holds_here` is true on every rank; a collective."""
    if ranks.world == 1:
        return holds_here
    agreed = torch.tensor(float(holds_here), device=device())
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def as_first(ranks: Ranks, numbers: list[float]) -> list[float]:
    """Returns rank 0's numbers, bit for bit, in place of each rank's own; a collective."""
    if ranks.world == 1:
        return numbers
    shared = torch.tensor(numbers, dtype=torch.float64, device=device())
    dist.broadcast(shared, 0)
    return shared.tolist()


def gathered(ranks: Ranks, part_NC: Tensor) -> Tensor:
    """Returns, on the host, the rows of all ranks' parts one after another, of which each has any number; a
    collective."""
    if ranks.world == 1:
        return part_NC
    size = torch.tensor([len(part_NC)], device=device())
    sizes = [torch.empty_like(size) for _ in range(ranks.world)]
    dist.all_gather(sizes, size)
    counts = [int(count) for count in sizes]
    padded = torch.nn.functional.pad(part_NC, (0, 0, 0, max(counts) - len(part_NC))).to(device())
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).cpu()


def joined(ranks: Ranks, part_N: Tensor, sizes: list[int]) -> Tensor | None:
    """Returns, on rank 0 alone, the vector of which each rank has a part of the given size; None elsewhere; a
    collective."""
    if ranks.world == 1:
        return part_N
    longest = max(sizes)
    padded = torch.nn.functional.pad(part_N, (0, longest - len(part_N)))
    padded_parts = [torch.empty_like(padded) for _ in sizes] if ranks.first else None
    dist.gather(padded, padded_parts)
    if padded_parts is None:
        return None
    return torch.cat([padded_part[:size] for padded_part, size in zip(padded_parts, sizes, strict=True)])
