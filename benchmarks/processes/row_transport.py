"""Clients that pull and push rows of a table in another process, each over one transport; part of `engines.py`.

A server holds a table of floats. A client asks for `IDS` of its rows (a pull), or sends as many that are added to
them (a push), and waits until that is done. Processes have one thread each, over the loopback interface.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trials.runtime.fork_server import server_environment, without_main

IDS, FLOATS, TABLE_ROWS = 4096, 16, 100_000
WARM_UP = 20
TIMEOUT = datetime.timedelta(seconds=120)
Samples = tuple[list[float], list[float]]
"""Milliseconds of each pull and of each push."""


class Table:
    """The rows that a server holds."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rows = torch.zeros(TABLE_ROWS, FLOATS)

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids]

    def push(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.rows.index_add_(0, ids, rows)


def timed(
    pull: Callable[[torch.Tensor], torch.Tensor],
    push: Callable[[torch.Tensor, torch.Tensor], object],
    repeats: int,
) -> Samples:
    """Pulls, then pushes, so many times each after some that do not count."""
    torch.set_num_threads(1)
    ids, rows = torch.randperm(TABLE_ROWS)[:IDS], torch.ones(IDS, FLOATS)
    assert pull(ids).shape == rows.shape
    steps: tuple[Callable[[], object], ...] = (lambda: pull(ids), lambda: push(ids, rows))
    pulls, pushes = ([_milliseconds(step) for _ in range(WARM_UP + repeats)][WARM_UP:] for step in steps)
    return pulls, pushes


def _milliseconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - began)


def by_ray(clients: int, repeats: int, folder: Path) -> list[Samples]:
    """A server and clients that are actors; a connection to Ray is there."""
    import ray

    class Client:
        def run(self, server: Any) -> Samples:
            return timed(
                lambda ids: torch.from_numpy(ray.get(server.pull.remote(ids.numpy()))),
                lambda ids, rows: ray.get(server.push.remote(ids.numpy(), rows.numpy())),
                repeats,
            )

    class Server(Table):
        def pull(self, ids: Any) -> Any:
            return super().pull(torch.from_numpy(ids)).numpy()

        def push(self, ids: Any, rows: Any) -> None:
            super().push(torch.from_numpy(ids), torch.from_numpy(rows))

    server: Any = ray.remote(num_cpus=0)(Server).remote()
    actors: list[Any] = [ray.remote(num_cpus=0)(Client).remote() for _ in range(clients)]
    samples: list[Samples] = ray.get([actor.run.remote(server) for actor in actors])
    for actor in (server, *actors):
        ray.kill(actor)
    return samples


def by_rpc(clients: int, repeats: int, folder: Path) -> list[Samples]:
    """`torch.distributed.rpc`."""
    return _in_processes(_rpc_process, clients, repeats, folder)


def by_send(clients: int, repeats: int, folder: Path) -> list[Samples]:
    """`send` and `recv` of gloo groups, one per client, whom a thread of the server answers."""
    return _in_processes(_send_process, clients, repeats, folder)


def _in_processes(main: Callable[..., None], clients: int, repeats: int, folder: Path) -> list[Samples]:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.rpc"])
    results: Queue[Samples] = context.Queue()
    meeting = folder / f"{main.__name__}{clients}"
    processes = [
        context.Process(target=main, args=(rank, clients, repeats, str(meeting), results))
        for rank in range(clients + 1)
    ]
    with server_environment(), without_main():
        for process in processes:
            process.start()
    samples = [results.get(timeout=TIMEOUT.total_seconds()) for _ in range(clients)]
    for process in processes:
        process.join(TIMEOUT.total_seconds())
    return samples


_TABLE: list[Table] = []
"""The table of a process that is a server over `torch.distributed.rpc`, which calls functions by name."""


def _rpc_pull(ids: torch.Tensor) -> torch.Tensor:
    return _TABLE[0].pull(ids)


def _rpc_push(ids: torch.Tensor, rows: torch.Tensor) -> None:
    _TABLE[0].push(ids, rows)


def _rpc_process(rank: int, clients: int, repeats: int, meeting: str, results: Queue[Samples]) -> None:
    from torch.distributed import rpc

    _TABLE.append(Table())
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of what it deprecates
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=60)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        str(rank), rank=rank, world_size=clients + 1, rpc_backend_options=options
    )
    if rank:
        results.put(
            timed(
                lambda ids: rpc.rpc_sync("0", _rpc_pull, (ids,)),
                lambda ids, rows: rpc.rpc_sync("0", _rpc_push, (ids, rows)),
                repeats,
            )
        )
    rpc.shutdown()


def _send_process(rank: int, clients: int, repeats: int, meeting: str, results: Queue[Samples]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=clients + 1, timeout=TIMEOUT
    )
    groups = [dist.new_group([0, client]) for client in range(1, clients + 1)]
    if rank:
        results.put(timed(*_over(groups[rank - 1]), repeats))
    else:
        table, steps = Table(), WARM_UP + repeats
        threads = [
            threading.Thread(target=_answer, args=(table, group, client, steps))
            for client, group in enumerate(groups, start=1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    dist.barrier()
    dist.destroy_process_group()


def _over(group: Any) -> tuple[Callable[..., torch.Tensor], Callable[..., object]]:
    """A client's pull and push; a push ends with the server's word that it is done."""

    def pull(ids: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(IDS, FLOATS)
        dist.send(ids, 0, group=group)
        dist.recv(rows, 0, group=group)
        return rows

    def push(ids: torch.Tensor, rows: torch.Tensor) -> None:
        dist.send(ids, 0, group=group)
        dist.send(rows, 0, group=group)
        dist.recv(torch.empty(1), 0, group=group)

    return pull, push


def _answer(table: Table, group: Any, client: int, steps: int) -> None:
    """Serves one client: `timed` pulls once to see the shape, then pulls and pushes."""
    ids, rows = torch.empty(IDS, dtype=torch.long), torch.empty(IDS, FLOATS)
    for _ in range(1 + steps):
        dist.recv(ids, client, group=group)
        dist.send(table.pull(ids), client, group=group)
    for _ in range(steps):
        dist.recv(ids, client, group=group)
        dist.recv(rows, client, group=group)
        table.push(ids, rows)
        dist.send(torch.ones(1), client, group=group)
