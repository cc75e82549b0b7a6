"""Reservations of hosts, CPUs and devices for candidates: placement groups of Ray, all of a candidate's or none.

A reservation is kept for the next candidate of the same shape: Ray takes up to a second to give resources back
and to reserve them anew. It is given back once nobody has taken it for a while, or another shape waits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence, Set
from functools import partial
from typing import Any, NamedTuple

from trials.runtime.hosts.ray_connection import Head, devices_here

RAYS_STEPS = 10_000
"""The smallest part of a resource that Ray counts is one by so many."""
IDLE_SECONDS = 10.0
"""Seconds that a reservation is kept while no candidate has it."""


class Shape(NamedTuple):
    """What a candidate needs."""

    hosts: int
    cpus: float
    """Number of CPUs per host, for its ranks."""
    gpus: float
    """Number of GPUs per host; less than one if candidates share a device."""
    servers: int = 0
    """Number of servers of tables, which are on the hosts in turn."""
    server_cpus: float = 0.0
    """Number of CPUs per server."""

    def cpus_of(self, host: int) -> float:
        """Returns the CPUs of one of the hosts, with those of its servers; the first host has the most."""
        return self.cpus + len(range(host, self.servers, self.hosts)) * self.server_cpus

    @property
    def words(self) -> str:
        """The shape for sentences."""
        gpus = f" and {self.gpus:g} GPU(s)" if self.gpus else ""
        served = (
            f", with {self.server_cpus:g} CPU(s) more for each of {self.servers} server(s) of tables"
            if self.servers
            else ""
        )
        return f"{self.hosts} node(s) with {self.cpus:g} CPU(s){gpus} each{served}"


def shape(
    hosts: int, ranks_per_host: int, threads: int, servers: int | None = 0, on_device: int = 1
) -> Shape:
    """Returns what a candidate needs: on machines with CUDA devices one per rank, and a CPU per process; else a
    CPU per thread of each.

    Args:
        hosts: number of its hosts.
        ranks_per_host: number of ranks on each of them.
        threads: number of threads per rank.
        servers: number of servers of tables; None: as many as hosts, the most that a plan takes unless it is asked
            for more.
        on_device: number of candidates that share a device, of those with one rank per host: several ranks of one
            candidate need devices of their own.
    """
    servers = hosts if servers is None else servers
    if devices_here() is not None:
        gpus = part_of_a_device(on_device) if ranks_per_host == 1 else float(ranks_per_host)
        return Shape(hosts, float(ranks_per_host), gpus, servers, 1.0)
    return Shape(hosts, float(ranks_per_host * threads), 0.0, servers, float(threads))


def part_of_a_device(on_device: int) -> float:
    """Returns what each of so many has of a device, in steps that Ray can count, so that all of them fit."""
    return math.floor(RAYS_STEPS / on_device) / RAYS_STEPS


def room_for(wanted: Shape, cpus: float, gpus: float) -> int:
    """Returns how many candidates can be at once on a node with so many CPUs and GPUs, one host of each, which has
    as many servers as any."""
    by_cpus = int(cpus / wanted.cpus_of(0))
    if not wanted.gpus:
        return by_cpus
    # a part of a device is a part of one device
    by_gpus = int(gpus) * int(1.0 / wanted.gpus) if wanted.gpus < 1.0 else int(gpus / wanted.gpus)
    return min(by_cpus, by_gpus)


def most_at_once(hosts: int, rooms: Sequence[int]) -> int:
    """Returns how many candidates of so many hosts, which are different nodes, can be at once on nodes of which
    each has room for so many."""
    most = sum(rooms) // hosts
    # one candidate is on a node once: of more room than there are candidates nobody has any use
    while most and sum(min(room, most) for room in rooms) < most * hosts:
        most -= 1
    return most


class Place(NamedTuple):
    """One host of a reservation."""

    node: str
    """Id of its Ray node."""
    devices: tuple[str, ...]
    """Ids of its CUDA devices that are reserved; empty if none are."""


class Devices:
    """An actor that holds the devices of one host of a reservation; Ray says which ones to it alone."""

    def ids(self) -> tuple[str, ...]:
        """Returns the ids of the devices."""
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


class Reservation:
    """A placement group, asked for or there."""

    def __init__(self, wanted: Shape, nodes: Set[str], head: Head) -> None:
        """Asks the head for what is wanted on some of `nodes`.

        Raises:
            UserError: if the head does not answer.
        """
        from ray.util.placement_group import placement_group

        self.shape, self.nodes, self._head = wanted, frozenset(nodes), head
        gpus = {"GPU": wanted.gpus} if wanted.gpus else {}
        of_ready_nodes = {"ray.io/node-id": f"in({','.join(sorted(nodes))})"}
        self._group = head.ask(
            lambda: placement_group(
                [{"CPU": wanted.cpus_of(host)} | gpus for host in range(wanted.hosts)],
                strategy="STRICT_SPREAD",
                bundle_label_selector=[of_ready_nodes] * wanted.hosts,
            )
        )
        self._places: tuple[Place, ...] | None = None
        self._holders: list[Any] = []
        self._device_ids: list[Any] = []
        self.idle_since: float | None = None

    def places(self) -> tuple[Place, ...] | None:
        """Returns the hosts, in the order of their ranks; None if they are not reserved yet.

        Raises:
            UserError: if the head does not answer.
        """
        import ray
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._places is not None:
            return self._places
        table = self._head.ask(lambda: placement_group_table(self._group))
        if table.get("state") != "CREATED":
            return None
        node_ids = [table["bundles_to_node_id"][index] for index in range(self.shape.hosts)]
        if not self.shape.gpus:
            self._places = tuple(Place(node, ()) for node in node_ids)
            return self._places
        if not self._holders:
            for index in range(self.shape.hosts):
                here = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                holder = ray.remote(num_cpus=0, num_gpus=self.shape.gpus)(Devices)
                self._holders.append(holder.options(scheduling_strategy=here).remote())
            self._device_ids = [holder.ids.remote() for holder in self._holders]
        if len(ray.wait(self._device_ids, num_returns=self.shape.hosts, timeout=0)[0]) < self.shape.hosts:
            return None
        self._places = tuple(map(Place, node_ids, ray.get(self._device_ids)))
        return self._places

    def cancel(self) -> None:
        """Gives everything back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # the cluster may be gone, and all with it
            for holder in self._holders:
                self._head.ask(partial(ray.kill, holder))
            self._head.ask(lambda: remove_placement_group(self._group))


class Reservations:
    """The reservations of one study."""

    def __init__(self, head: Head) -> None:
        """Those of a cluster with this head."""
        self._head = head
        self._idle: list[Reservation] = []

    def ask(self, wanted: Shape, nodes: Set[str]) -> Reservation:
        """Returns a reservation of what is wanted on these nodes, kept or new; it need not be there yet.

        Raises:
            UserError: if the head does not answer.
        """
        for reservation in self._idle:
            places = reservation.places()
            if reservation.shape == wanted and places and all(place.node in nodes for place in places):
                self._idle.remove(reservation)
                reservation.idle_since, reservation.nodes = None, frozenset(place.node for place in places)
                return reservation
        self.drop_idle(0.0)  # what is kept for others may be what this one needs
        return Reservation(wanted, nodes, self._head)

    def give_back(self, reservation: Reservation) -> None:
        """Keeps a reservation whose candidate has ended for the next one."""
        reservation.idle_since = time.monotonic()
        self._idle.append(reservation)

    def room_on(self, node: str, resource: str) -> float:
        """Returns how much of a node's `CPU` or `GPU` is kept for nobody, so that it can be had at any time."""
        kept = 0.0
        for reservation in self._idle:
            for host, place in enumerate(reservation.places() or ()):
                if place.node == node:
                    wanted = reservation.shape
                    kept += wanted.cpus_of(host) if resource == "CPU" else wanted.gpus
        return kept

    def drop_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Gives those back to Ray that nobody has taken for so long."""
        for reservation in list(self._idle):
            assert reservation.idle_since is not None
            if time.monotonic() - reservation.idle_since >= seconds:
                self._idle.remove(reservation)
                reservation.cancel()
