"""How many trials go on side by side, here or on the nodes of a cluster, and with how many threads each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dhen.errors import UserError
from search.config import StudyConfig
from search.planning.attempts import shapes_here
from trials.cluster.machine import cores, device, fastest_threads
from trials.hosts.here import devices_here
from trials.hosts.hosts import Node
from trials.hosts.placement import most_at_once, room_for, shape
from trials.strategy import named

MOST_ON_DEVICE = 16
"""Largest number of trials on an accelerator of a cluster's node: each has a CUDA context of 0.7 GiB there."""
MOST = 4
"""Largest number of trials side by side where the study does not say
(docs/decisions/0007-candidates-side-by-side.md)."""


@dataclass(frozen=True)
class Parallelism:
    """The shares that trials have of this machine, or of the nodes of a cluster."""

    side_by_side: int
    """Number of trials at the same time."""
    threads: int
    """Number of CPU threads per rank."""
    sharing: int
    """Largest number of trials that share a machine, or an accelerator of it, each in the least shape."""
    ranks: int | None = None
    """Largest number of ranks of all trials at the same time, where there are several shapes: a trial in a larger
    one takes the places of several in the least."""
    on_device: int = 1
    """Number of trials that share an accelerator of a cluster's node."""


def parallelism(
    parallel: int | None, threads: int | None, ranks: int = 1, larger: Sequence[int] = ()
) -> Parallelism:
    """Trials side by side and threads per rank; what is not given follows from the other.

    A trial has so many `ranks`, processes that share this machine, or one of the `larger` numbers.

    Where neither is given: as many trials as have accelerators of their own, else as many as there are cores, four
    at most; then of each trial's share of the cores as many threads as are found to gain (`fastest_threads`).
    """
    devices = devices_here()
    if parallel is None:
        most = devices // ranks if devices is not None else min(MOST, cores() // (ranks * (threads or 1)))
        parallel = max(1, most)
    at_once = max(ranks * parallel, *larger, 1)
    threads = threads or fastest_threads(max(1, cores() // at_once))
    sharing = parallel if devices is None else max(1, math.ceil(ranks * parallel / devices))
    return Parallelism(parallel, threads, sharing, ranks=at_once if larger else None)


def cluster_parallelism(
    nodes: Sequence[Node],
    ranks: tuple[int, int],
    parallel: int | None,
    threads: int | None,
    larger: Sequence[tuple[int, int]] = (),
    servers: int | None = 0,
) -> Parallelism:
    """Trials side by side and threads per rank on nodes of a cluster; what is not given follows from them.

    Args:
        nodes: the cluster's nodes.
        ranks: number of hosts of a trial, and of ranks per host.
        parallel: number of trials at the same time; None: as many as the nodes can hold at once, if nobody else
            has anything of them. Where that is more than there are accelerators for, trials with one rank per host
            share them.
        threads: number of threads per rank; None: as on one machine, of each trial's share of a node's CPUs as
            many as are found to gain.
        larger: the same numbers as `ranks` in other shapes that trials may have.
        servers: number of servers of tables of a trial, each with as many threads as a rank; None: see `shape`.
    """
    hosts, ranks_per_host = ranks
    on_host = [per_host + _servers_per_host(servers, count) for count, per_host in (ranks, *larger)]
    processes, widest = on_host[0], max(on_host)
    if threads is None:
        cpus = int(min((node.cpus for node in nodes if node.cpus >= widest), default=1))
        beside = MOST if parallel is None else math.ceil(parallel * hosts / max(1, len(nodes)))
        on_a_node = max(1, min(beside, cpus // processes))
        threads = fastest_threads(max(1, cpus // max(widest, processes * on_a_node)))
    on_device = _on_device(nodes, ranks, parallel or 1, threads, servers)
    wanted = shape(hosts, ranks_per_host, threads, servers, on_device)
    rooms = [room_for(wanted, node.cpus, node.gpus) for node in nodes]
    parallel = parallel or max(1, most_at_once(hosts, rooms))  # where none has room, that is said later
    at_once = max(parallel * hosts * ranks_per_host, *map(math.prod, larger), 1)
    # devices are shared by those that are on one, a node's CPUs and memory by all that are on the node
    sharing = on_device if wanted.gpus else max(1, min(parallel, max(rooms, default=1)))
    return Parallelism(parallel, threads, sharing, at_once if larger else None, on_device)


def _on_device(
    nodes: Sequence[Node], ranks: tuple[int, int], parallel: int, threads: int, servers: int | None
) -> int:
    """Returns the least number of trials on an accelerator with which so many are at once on the nodes; 1 where
    trials have several ranks on a host, or none has room."""
    hosts, ranks_per_host = ranks
    rooms = dict[int, int]()
    for on_device in range(1, MOST_ON_DEVICE + 1 if ranks_per_host == 1 else 2):
        wanted = shape(hosts, ranks_per_host, threads, servers, on_device)
        rooms[on_device] = most_at_once(hosts, [room_for(wanted, node.cpus, node.gpus) for node in nodes])
    enough = [on_device for on_device, room in rooms.items() if room >= parallel]
    return min(enough, default=max(rooms, key=lambda on_device: (rooms[on_device], -on_device)))


def most_servers(config: StudyConfig) -> int | None:
    """Returns the most servers of tables that a trial has; None for as many as hosts, where none are asked for."""
    if not config.training.tables.on_servers:
        return 0
    return config.servers or (named(config.technique).servers if config.technique else 0) or None


def _servers_per_host(servers: int | None, hosts: int) -> int:
    return 1 if servers is None else -(-servers // hosts)


def study_parallelism(config: StudyConfig, nodes: Sequence[Node] | None = None) -> Parallelism:
    """The shares of a study's trials; one trial at a time where only then the wall clock tells a forward time.

    Args:
        config: the study's settings.
        nodes: nodes of the cluster that it trains on; None where that is this machine.

    Raises:
        UserError: where the study says several all the same.
    """
    disturbed = config.serving.threads > 1 or device().type != "cpu"
    alone = config.serving.max_ms is not None and disturbed
    if alone and config.parallel is not None and config.parallel > 1:
        raise UserError(
            f"parallel={config.parallel} and serving.max_ms: a forward time with several threads, or on an "
            "accelerator, is measured while nothing else trains; give parallel=1, or serving.threads=1 on a CPU."
        )
    parallel = 1 if alone else config.parallel
    if nodes is not None:
        least, *more = config.declared_ranks or ((1, 1),)
        return cluster_parallelism(nodes, least, parallel, config.threads, more, most_servers(config))
    least_here, *more_here = shapes_here(config)
    return parallelism(parallel, config.threads, least_here, more_here)
